#include "io/disk_store.hpp"

#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace kvtier {
namespace {

using disk::kBlock;

constexpr std::size_t kScanBytes = 4 << 20;  // read at a time while scanning the table

std::uint64_t round_up(std::uint64_t bytes) { return (bytes + kBlock - 1) / kBlock * kBlock; }

}  // namespace

DiskFootprint DiskFootprint::of(std::size_t payload_bytes, std::size_t label_bytes, std::uint32_t journal_entries) {
  // header + the rest of the table's last block + two journals + the lock file's block
  const std::uint64_t fixed = kBlock + kBlock + 2 * round_up(disk::Generations::bytes(journal_entries)) + kBlock;
  return {static_cast<std::size_t>(round_up(payload_bytes)), disk::record_bytes(label_bytes), fixed};
}

std::uint64_t DiskFootprint::slots_in(std::uint64_t bytes) const {
  return bytes < fixed_bytes ? 0 : (bytes - fixed_bytes) / (page_bytes + record_bytes);
}

std::uint64_t DiskStore::table_bytes() const {
  return round_up(kBlock + std::uint64_t{options_.slots} * footprint_.record_bytes);
}

std::uint64_t DiskStore::allocated_bytes() const {
  std::uint64_t bytes = files::allocated(slab_.get()) + files::allocated(table_.get()) + files::allocated(lock_.get());
  return bytes + generations_->allocated();
}

bool DiskStore::names(const Entry& entry, const PageIdentity& identity) {
  return entry.checksum != 0 && entry.generation == identity.generation &&
         std::memcmp(entry.digest, identity.digest, sizeof(entry.digest)) == 0;
}

int DiskStore::clear_record(Slot slot) {
  if (slot >= options_.slots) return -EINVAL;
  std::lock_guard writer(writing_);
  {
    std::lock_guard lock(mutex_);
    Entry& entry = entries_[slot];
    if (entry.checksum == 0 && entry.generation == 0) return 0;
    entry = Entry{0, 1, {0, 0}};
  }
  std::memset(scratch_.data(), 0, scratch_.size());
  const int rc = files::write_all(table_.get(), scratch_.data(), scratch_.size(), record_offset(slot));
  if (rc == 0) {
    std::lock_guard lock(mutex_);
    entries_[slot].generation = 0;
  }
  return rc;
}

int DiskStore::write_record(Slot slot, const PageIdentity* identity, std::uint64_t checksum) {
  if (slot >= options_.slots || checksum == 0) return -EINVAL;
  if (generations_->of(identity->space) != identity->generation) return -ESTALE;
  std::lock_guard writer(writing_);
  const disk::RecordHead head{0, ++sequence_, generations_->sequence(), checksum};
  disk::encode_record(scratch_.data(), scratch_.size(), slot, id_, head, identity, options_.label_bytes);
  {
    std::lock_guard lock(mutex_);
    entries_[slot] = Entry{0, 1, {0, 0}};  // until the write has ended nobody knows what is there
  }
  const int rc = files::write_all(table_.get(), scratch_.data(), scratch_.size(), record_offset(slot));
  if (rc < 0) return rc;
  Entry entry{checksum, identity->generation, {0, 0}};
  std::memcpy(entry.digest, identity->digest, sizeof(entry.digest));
  std::lock_guard lock(mutex_);
  entries_[slot] = entry;
  return 0;
}

std::uint64_t DiskStore::checksum_for(Slot slot, const PageIdentity* identity) const {
  if (slot >= options_.slots || generations_->of(identity->space) != identity->generation) return 0;
  std::lock_guard lock(mutex_);
  const Entry& entry = entries_[slot];
  return names(entry, *identity) ? entry.checksum : 0;
}

// On a thread of its own, because a sync cannot be given up: on a device that hangs the caller does not.
std::uint64_t DiskStore::invalidate(const std::uint8_t* space) {
  const std::lock_guard one_at_a_time(invalidations_);
  const auto only_here = [&](int error) -> std::system_error {
    generations_->advance_here(space);
    return {error, std::generic_category(), "cannot make " + path("generations") + " durable"};
  };
  if (invalidating_->load()) throw only_here(ETIMEDOUT);  // an earlier one has not come back
  disk::Generations::Space copy{};
  if (space != nullptr) std::copy_n(space, copy.size(), copy.begin());
  std::shared_ptr<std::promise<std::uint64_t>> promise;
  std::thread worker;
  *invalidating_ = true;
  try {
    promise = std::make_shared<std::promise<std::uint64_t>>();
    worker = std::thread([promise, generations = generations_, busy = invalidating_, copy, all = space == nullptr] {
      try {
        const std::uint64_t generation = generations->advance(all ? nullptr : copy.data());
        *busy = false;
        promise->set_value(generation);
      } catch (...) {
        *busy = false;
        promise->set_exception(std::current_exception());
      }
    });
  } catch (const std::exception&) {  // no thread is to be had, or no memory
    *invalidating_ = false;
    throw only_here(EAGAIN);
  }
  std::future<std::uint64_t> result = promise->get_future();  // not before: a promise that goes unkept needs memory
  if (result.wait_for(options_.sync_limit) != std::future_status::ready) {
    worker.detach();
    throw only_here(ETIMEDOUT);
  }
  worker.join();
  return result.get();
}

void DiskStore::for_each_record(std::uint64_t table_bytes, const Visit& visit) const {
  const std::size_t record = footprint_.record_bytes;
  const std::size_t per_chunk = std::max<std::size_t>(1, kScanBytes / record);
  std::vector<std::byte> chunk(per_chunk * record);
  for (std::uint64_t first = 0; first < options_.slots; first += per_chunk) {
    const std::uint64_t offset = record_offset(static_cast<Slot>(first));
    if (offset >= table_bytes) return;
    const std::size_t wanted = std::min<std::uint64_t>(per_chunk, options_.slots - first) * record;
    const std::int64_t got = files::read_all(table_.get(), chunk.data(), wanted, offset);
    files::check(static_cast<int>(std::min<std::int64_t>(got, 0)), "cannot read " + path("table"));
    // A record that the file cuts off is no record.
    for (std::size_t i = 0; i < static_cast<std::size_t>(got) / record; ++i) {
      const std::byte* bytes = chunk.data() + i * record;
      std::uint64_t start;
      std::memcpy(&start, bytes, sizeof(start));
      if (start == 0) continue;
      const Slot slot = static_cast<Slot>(first + i);
      visit(slot, disk::decode_record(bytes, record, slot, id_));
    }
  }
}

DiskStore::Inventory DiskStore::scan() const {
  const std::size_t size = identity_bytes(options_.label_bytes);
  std::vector<Slot> slots;
  std::vector<std::uint64_t> sequences;
  std::vector<std::uint8_t> identities;
  for_each_record(table_bytes(), [&](Slot slot, const disk::RecordHead* head) {
    if (!head) return;
    const PageIdentity* identity = disk::record_identity(head);
    // 0 says that there is no valid record here, whatever the table says.
    const std::uint64_t sum = checksum_for(slot, identity);
    if (sum == 0 || sum != head->page_checksum) return;
    slots.push_back(slot);
    sequences.push_back(head->sequence);
    const std::uint8_t* bytes = reinterpret_cast<const std::uint8_t*>(identity);
    identities.insert(identities.end(), bytes, bytes + size);
  });
  std::vector<std::uint32_t> order(slots.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](auto a, auto b) { return sequences[a] < sequences[b]; });
  Inventory inventory;
  inventory.slots.reserve(order.size());
  inventory.identities.resize(identities.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    inventory.slots.push_back(slots[order[i]]);
    std::memcpy(inventory.identities.data() + i * size, identities.data() + order[i] * size, size);
  }
  return inventory;
}

}  // namespace kvtier
