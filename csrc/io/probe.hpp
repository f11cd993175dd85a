// What I/O a directory allows, found out by doing it: the flag for direct I/O may be accepted at open and refused at
// the first write, and io_uring may be forbidden to a container.
#pragma once

#include <string>

namespace kvtier {

struct IoProbe {
  bool direct = false;     // O_DIRECT reads and writes of 4 KiB work; else buffered
  bool uring = false;      // and so they do through io_uring; else threads
  std::string filesystem;  // "ext4", "xfs", ...; "type 0x..." when unknown
  std::string why;         // one line
};

// Throws std::invalid_argument with one line for a path that is missing, no directory, not writable or in memory, and
// std::system_error where the trial itself fails (no space, broken device). Leaves nothing behind.
IoProbe probe(const std::string& dir);

// The path checks alone; returns the file system's name.
std::string check_directory(const std::string& dir);

}  // namespace kvtier
