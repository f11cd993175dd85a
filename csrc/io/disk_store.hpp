// The disk tier's files: page-sized slots in a preallocated slab, and a table that says which page each slot holds.
//
// Protocol. The mover's I/O thread reads and writes pages itself, at offset(slot) of fd(), through a FileEngine; the
// store never touches a page. Before it overwrites a slot it calls clear_record(), after the page is written
// write_record(); then whatever instant the process dies at, a record names a slot whose page was written whole, and
// with no sync: a record that reached the device before its page (power loss) is caught by the page's own checksum, as
// every page is verified after it was read. Before serving a slot: checksum_for() must not be 0 and must equal the
// checksum of the bytes that were read.
//
// A record is valid if its own checksum is right and its generation is generation(its namespace). invalidate() makes
// the old generation's records invalid at once and for ever, written before or after.
//
// Thread-safe. clear_record(), write_record() and checksum_for() are meant for one thread; invalidate() syncs the
// device and delays none of them.
//
// Memory: 32 bytes per slot. On disk: see Footprint.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/identity.hpp"
#include "common/types.hpp"
#include "io/disk_format.hpp"
#include "io/files.hpp"
#include "io/generations.hpp"
#include "io/probe.hpp"

namespace kvtier {

enum class DirectIo : std::uint8_t { kAuto = 0, kOn = 1, kOff = 2 };

struct DiskOptions {
  std::string dir;
  Slot slots = 0;
  std::size_t payload_bytes = 0;
  std::size_t label_bytes = 0;
  std::uint8_t geometry_tag[32] = {};  // what the bytes of a page mean; other pages are refused
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
  DirectIo direct = DirectIo::kAuto;
  std::uint32_t journal_entries = 4096;  // half of them: how many namespaces may be invalidated one by one
  std::chrono::nanoseconds sync_limit = std::chrono::seconds(10);  // for an invalidation to become durable
};

// Bytes on disk: slots x (page_bytes + record_bytes) + fixed. Fixed is the table's header, the rest of its last block,
// two journals (the second only while one replaces the other) and the lock.
struct DiskFootprint {
  std::size_t page_bytes;  // payload rounded up to 4096
  std::size_t record_bytes;
  std::uint64_t fixed_bytes;

  static DiskFootprint of(std::size_t payload_bytes, std::size_t label_bytes, std::uint32_t journal_entries);
  std::uint64_t bytes(std::uint64_t slots) const { return slots * (page_bytes + record_bytes) + fixed_bytes; }
  // The most slots that fit into `bytes`; 0 when not even one does.
  std::uint64_t slots_in(std::uint64_t bytes) const;
};

class DiskStore {
 public:
  // Creates the store in an empty directory, or reopens what is there. std::invalid_argument (one line, naming the
  // field, the value and the remedy) for what the user must change, std::system_error where a file operation failed.
  // Nothing that exists is deleted; a creation that fails leaves nothing behind.
  static std::unique_ptr<DiskStore> open(const DiskOptions& options);
  ~DiskStore();
  // Gives the directory up. Nothing may be using fd() any more; what is called later fails with EBADF.
  void close();
  DiskStore(const DiskStore&) = delete;
  DiskStore& operator=(const DiskStore&) = delete;

  int fd() const { return slab_.get(); }
  std::uint64_t offset(Slot slot) const { return std::uint64_t{slot} * footprint_.page_bytes; }
  Slot slots() const { return options_.slots; }
  std::size_t page_bytes() const { return footprint_.page_bytes; }
  std::size_t payload_bytes() const { return options_.payload_bytes; }
  std::size_t label_bytes() const { return options_.label_bytes; }
  const std::string& dir() const { return options_.dir; }
  const DiskFootprint& footprint() const { return footprint_; }
  std::uint64_t allocated_bytes() const;  // what the files take now, by the file system's own account
  bool direct() const { return direct_; }
  const IoProbe& io() const { return probe_; }
  std::size_t adopted() const { return adopted_; }     // valid records found when it was opened
  const std::string& notes() const { return notes_; }  // what was found wrong and mended then; one line, or empty

  // 0 or -errno. An empty record costs no I/O to clear.
  int clear_record(Slot slot);
  // 0 or -errno; -ESTALE: the identity's generation is not the valid one any more; nothing was written, and the slot
  // stays cleared. That says nothing about the device's health. `checksum` is not 0; `identity` is followed by its
  // label.
  int write_record(Slot slot, const PageIdentity* identity, std::uint64_t checksum);
  // The page's checksum, or 0 when the slot holds no valid record or that of another identity.
  std::uint64_t checksum_for(Slot slot, const PageIdentity* identity) const;

  std::uint64_t generation(const std::uint8_t* space) const { return generations_->of(space); }
  // Every record of `space` (32 bytes; null: of all namespaces) so far, and any written later with an older generation,
  // is invalid. Returns the new generation, durable. Throws std::system_error when it could not be made durable, within
  // sync_limit: in force in this process, lost with it. After more than journal_entries / 2 namespaces were invalidated
  // one by one, all generations rise together.
  std::uint64_t invalidate(const std::uint8_t* space);

  struct Inventory {
    std::vector<Slot> slots;               // oldest record first
    std::vector<std::uint8_t> identities;  // identity_bytes(label_bytes) each
  };
  // The valid records, read from the table. Throws std::system_error.
  Inventory scan() const;

 private:
  // What checksum_for() needs, per slot. checksum 0: no record to serve; then generation != 0 says that bytes may
  // still lie in the table.
  struct Entry {
    std::uint64_t checksum;
    std::uint64_t generation;
    std::uint64_t digest[2];
  };

  explicit DiskStore(const DiskOptions& options);
  [[noreturn]] void refuse_path(const std::string& why) const;
  void lock_directory();
  void choose_io();
  void write_new_files();
  void remove_new_files();
  void reopen();
  void check_header(const disk::Header& header) const;
  void check_space(std::uint64_t present) const;
  void load_records(std::uint64_t table_bytes, std::uint64_t slab_bytes);
  void adopt_generations(const std::string& damage);
  void note(const std::string& text);
  disk::Header make_header() const;
  std::uint64_t table_bytes() const;
  std::uint64_t slab_bytes() const { return std::uint64_t{options_.slots} * footprint_.page_bytes; }
  std::uint64_t record_offset(Slot slot) const { return disk::kBlock + std::uint64_t{slot} * footprint_.record_bytes; }
  std::string path(const char* name) const { return options_.dir + "/" + name; }
  // Calls visit(slot, bytes, head) for every record that is not all empty; head is null for garbage.
  using Visit = std::function<void(Slot, const disk::RecordHead*)>;
  void for_each_record(std::uint64_t table_bytes, const Visit& visit) const;
  static bool names(const Entry& entry, const PageIdentity& identity);

  const DiskOptions options_;
  const DiskFootprint footprint_;
  IoProbe probe_;
  bool direct_ = false;
  files::Fd lock_;
  files::Fd slab_;
  files::Fd table_;
  disk::StoreId id_{};
  std::shared_ptr<disk::Generations> generations_;  // shared with an invalidation that hangs
  std::shared_ptr<std::atomic<bool>> invalidating_ = std::make_shared<std::atomic<bool>>(false);
  std::size_t adopted_ = 0;
  std::string notes_;

  std::mutex invalidations_;  // one at a time
  std::mutex writing_;        // of records: scratch_, sequence_ and the order of table writes
  std::vector<std::byte> scratch_;
  std::uint64_t sequence_ = 0;
  mutable std::mutex mutex_;  // of entries_; never held during I/O
  std::vector<Entry> entries_;
  std::uint64_t highest_generation_ = 0;  // seen in any record while opening
  std::uint64_t highest_journal_ = 0;
};

}  // namespace kvtier
