// The bytes of a disk store's files. All integers little-endian. Nothing read from a file is used before the checksum
// over it was found right.
//
//   slab         slots x page_bytes                       the pages, nothing else
//   table        Header in 4096 bytes, then slots x record_bytes: RecordHead, identity, zeros
//   generations  twice journal_entries x JournalEntry, each in whole blocks: written from the start, all zeros: not
//                written yet; two copies, because a lost entry would bring invalidated pages back
//   lock         the process id of the holder, as text
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/identity.hpp"
#include "common/types.hpp"

namespace kvtier::disk {

inline constexpr std::size_t kBlock = 4096;  // unit of direct I/O, and of a header
inline constexpr char kMagic[8] = {'k', 'v', 't', 'i', 'e', 'r', 'D', 'T'};
inline constexpr std::uint32_t kVersion = 2;

// Seeds every checksum of one store, so that records of an earlier store in the same place are garbage.
struct StoreId {
  std::uint64_t lo;
  std::uint64_t hi;
};

struct Header {
  char magic[8];
  std::uint32_t version;
  std::uint32_t journal_entries;
  StoreId id;
  std::uint64_t slots;
  std::uint64_t payload_bytes;
  std::uint64_t page_bytes;
  std::uint64_t record_bytes;
  std::uint64_t label_bytes;
  std::uint8_t geometry_tag[32];
  std::uint32_t rank;
  std::uint32_t world;
  std::uint8_t zeros[kBlock - 120];
  std::uint64_t checksum;  // over all before it
};
static_assert(sizeof(Header) == kBlock);

struct RecordHead {
  std::uint64_t checksum;  // over the rest of the record, zeros included; 0: an empty record
  std::uint64_t sequence;  // of the write; orders records by age
  std::uint64_t journal;   // the journal's last sequence then: a journal that ends earlier has lost its end
  std::uint64_t page_checksum;
};
static_assert(sizeof(RecordHead) == 32);

enum class JournalKind : std::uint64_t { kSpace = 1, kMinimum = 2 };

struct JournalEntry {
  std::uint64_t checksum;
  std::uint64_t sequence;  // one more than the entry before
  JournalKind kind;
  std::uint64_t generation;
  std::uint8_t space[32];  // zeros for kMinimum
};
static_assert(sizeof(JournalEntry) == 64);
inline constexpr std::uint32_t kMinJournal = 4;  // entries
inline constexpr std::uint32_t kMaxJournal = 1 << 20;
inline constexpr std::uint64_t kMaxGeneration = std::uint64_t{1} << 62;  // so that one more never overflows
inline constexpr std::uint64_t kMaxSequence = std::uint64_t{1} << 62;    // of records and journal entries: the same

// 64-bit checksum of `bytes` (a multiple of 8) under a key; never 0. Each step (xor, odd multiply, xorshift: the
// finalizer of splitmix64, Steele et al. 2014) is a bijection of the state, so that a change within one 8-byte word is
// always seen; other damage passes with a chance of 2^-64.
std::uint64_t checksum(const void* data, std::size_t bytes, const StoreId& id, std::uint64_t key);

// A power of two up to a block, so that no record lies across two blocks; whole blocks beyond.
std::size_t record_bytes(std::size_t label_bytes);

std::uint64_t header_checksum(const Header& header);

// A whole record, ready to be written at `slot`; `record` has record_bytes(label_bytes).
void encode_record(std::byte* record, std::size_t record_size, Slot slot, const StoreId& id, const RecordHead& head,
                   const PageIdentity* identity, std::size_t label_bytes);

// Null unless `record` is exactly what encode_record wrote for this slot and store.
const RecordHead* decode_record(const std::byte* record, std::size_t record_size, Slot slot, const StoreId& id);

inline const PageIdentity* record_identity(const RecordHead* head) {
  return reinterpret_cast<const PageIdentity*>(head + 1);
}

}  // namespace kvtier::disk
