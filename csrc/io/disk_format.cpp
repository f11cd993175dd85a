#include "io/disk_format.hpp"

#include <bit>

namespace kvtier::disk {
namespace {

std::uint64_t mix(std::uint64_t state, std::uint64_t word) {
  state = (state ^ word) * 0xBF58476D1CE4E5B9ull;
  return state ^ (state >> 29);
}

constexpr std::uint64_t kHeaderKey = ~std::uint64_t{0};

}  // namespace

std::uint64_t checksum(const void* data, std::size_t bytes, const StoreId& id, std::uint64_t key) {
  std::uint64_t state = mix(mix(mix(0x94D049BB133111EBull, id.lo), id.hi), key);
  const std::byte* from = static_cast<const std::byte*>(data);
  for (std::size_t at = 0; at < bytes; at += 8) {
    std::uint64_t word;
    std::memcpy(&word, from + at, 8);
    state = mix(state, word);
  }
  state = mix(state, bytes);
  return state != 0 ? state : 1;
}

std::size_t record_bytes(std::size_t label_bytes) {
  const std::size_t needed = sizeof(RecordHead) + identity_bytes(label_bytes);
  return needed <= kBlock ? std::bit_ceil(needed) : (needed + kBlock - 1) / kBlock * kBlock;
}

std::uint64_t header_checksum(const Header& header) {
  return checksum(&header, offsetof(Header, checksum), header.id, kHeaderKey);
}

void encode_record(std::byte* record, std::size_t record_size, Slot slot, const StoreId& id, const RecordHead& head,
                   const PageIdentity* identity, std::size_t label_bytes) {
  const std::size_t used = sizeof(head) + identity_bytes(label_bytes);
  std::memcpy(record, &head, sizeof(head));
  std::memcpy(record + sizeof(head), identity, identity_bytes(label_bytes));
  std::memset(record + used, 0, record_size - used);
  const std::uint64_t sum = checksum(record + 8, record_size - 8, id, slot);
  std::memcpy(record, &sum, 8);
}

const RecordHead* decode_record(const std::byte* record, std::size_t record_size, Slot slot, const StoreId& id) {
  const RecordHead* head = reinterpret_cast<const RecordHead*>(record);
  if (head->checksum == 0 || head->checksum != checksum(record + 8, record_size - 8, id, slot)) return nullptr;
  return head;
}

}  // namespace kvtier::disk
