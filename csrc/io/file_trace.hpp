// A log of everything that changes a disk store's files, for tests of power loss: what was written and what was made
// durable, in order, so that a test can build every state that a disk may be found in. Off, it costs a load.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvtier::trace {

enum class Kind : std::uint8_t { kOpen, kWrite, kResize, kSync, kSyncDirectory, kRename, kRemove };

struct Event {
  Kind kind;
  std::uint64_t file;    // its inode; 0 where a path is named
  std::uint64_t number;  // of a write: its offset; of a resize: bytes; of an open: 1 if the file is new or was emptied
  std::string path;      // kOpen, kRename (from), kRemove, kSyncDirectory
  std::string to;        // kRename
  std::string bytes;     // kWrite
};

void start();
std::vector<Event> stop();
std::size_t length();  // events so far

// The first is said once the file is open, the others before the operation begins: from then on its effect may be
// there.
void opened(int fd, const std::string& path);
void writes(int fd, std::uint64_t offset, const std::byte* data, std::size_t bytes);
void resizes(int fd, std::uint64_t bytes);
void renames(const std::string& from, const std::string& to);
void removes(const std::string& path);
// These are said once they have succeeded.
void synced(int fd);
void synced_directory(const std::string& path);

}  // namespace kvtier::trace
