// Which generation of each namespace is the valid one: an append journal of fixed size, preallocated so that an
// invalidation never needs space. generation(space) = max(global minimum, the namespace's last entry), and it only ever
// rises. Every entry is written in two places, so that one bad sector or one write that never arrived loses nothing. A
// journal that lacks an entry in both cannot say what was invalidated; then everything was (see load()).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "io/disk_format.hpp"
#include "io/files.hpp"

namespace kvtier::disk {

class Generations {
 public:
  using Space = std::array<std::uint8_t, 32>;

  // Half of the journal's `entries` may name namespaces. When it is full and names more, the minimum is raised instead,
  // which invalidates every namespace.
  Generations(std::string dir, const StoreId& id, std::uint32_t entries)
      : dir_(std::move(dir)), id_(id), capacity_(entries) {}

  static std::uint64_t bytes(std::uint32_t entries) { return 2 * copy_bytes(entries); }

  std::uint64_t allocated() const { return allocated_; }  // bytes on disk

  void create();
  // Empty, or what is wrong with the journal; restart() must follow then. Entries that are right count in any case.
  std::string load();
  bool mended() const { return mended_; }  // load() found entries in one place only; the next advance() writes all anew
  // Writes a journal anew in which every generation up to `highest` is invalid. Throws std::system_error when it cannot
  // be written, or when what it has to go beyond leaves no number that a reader would take (EOVERFLOW): nobody counts
  // so far, but a forged store may say so.
  void restart(std::uint64_t highest, std::uint64_t sequence_seen);

  std::uint64_t of(const std::uint8_t* space) const;
  std::uint64_t highest() const;
  std::uint64_t sequence() const { return sequence_.load(); }

  // The new generation of `space` (null: of every namespace), durable on return. Throws std::system_error when it
  // could not be made durable; it is in force in this process even then.
  std::uint64_t advance(const std::uint8_t* space);
  // The new generation, in force in this process only, because the device hangs; the next advance() writes it too.
  std::uint64_t advance_here(const std::uint8_t* space);

 private:
  struct Hash {
    std::size_t operator()(const Space& space) const {
      std::size_t value;
      std::memcpy(&value, space.data(), sizeof(value));  // a fingerprint is a hash already
      return value;
    }
  };

  static std::uint64_t copy_bytes(std::uint32_t entries) {
    return (std::uint64_t{entries} * sizeof(JournalEntry) + kBlock - 1) / kBlock * kBlock;
  }

  JournalEntry entry(JournalKind kind, std::uint64_t generation, const std::uint8_t* space,
                     std::uint64_t sequence) const;
  bool right(const JournalEntry& entry) const;
  void apply(const JournalEntry& entry);
  std::string adopt(const std::vector<JournalEntry>& first, const std::vector<JournalEntry>& second);
  void append(const JournalEntry& entry);
  void rewrite();
  void check_numbers(std::uint64_t generation, std::uint64_t sequence) const;
  std::uint64_t bytes() const { return bytes(capacity_); }
  std::string path() const { return dir_ + "/generations"; }

  const std::string dir_;
  const StoreId id_;
  const std::uint32_t capacity_;
  files::Fd file_;
  std::mutex writing_;  // one advance() at a time; held while the device syncs
  std::size_t used_ = 0;
  std::atomic<bool> behind_{false};  // advance_here() did what the journal does not know
  bool mended_ = false;
  std::atomic<std::uint64_t> allocated_{0};
  std::atomic<std::uint64_t> sequence_{0};
  mutable std::mutex mutex_;  // of what follows; never held during I/O
  std::uint64_t minimum_ = 0;
  std::unordered_map<Space, std::uint64_t, Hash> spaces_;
};

}  // namespace kvtier::disk
