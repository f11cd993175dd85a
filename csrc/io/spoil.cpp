#include "io/spoil.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace kvtier::spoil {
namespace {

using Kind = FaultPlan::Kind;

std::uint64_t inode_of(int fd) {
  struct stat info{};
  return ::fstat(fd, &info) == 0 ? info.st_ino : 0;
}

}  // namespace

std::uint64_t astray(int fd, std::uint64_t offset, std::size_t bytes, std::uint64_t by) {
  struct stat info{};
  const std::uint64_t size = ::fstat(fd, &info) == 0 ? static_cast<std::uint64_t>(info.st_size) : 0;
  if (size < bytes) return offset;
  const std::uint64_t last = size - bytes;
  const std::uint64_t to = offset + by;
  if (to <= last) return to;
  return bytes % kBlock == 0 ? to % (last + kBlock) / kBlock * kBlock % (last + 1) : to % (last + 1);
}

void flip(std::byte* bytes, std::size_t count, std::uint64_t bit) {
  if (count == 0) return;
  bit %= count * 8;
  bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
}

void FormerBlocks::keep(int fd, std::uint64_t offset, std::size_t bytes) {
  const std::uint64_t inode = inode_of(fd);
  const std::unique_ptr<std::byte, decltype(&std::free)> block(
      static_cast<std::byte*>(std::aligned_alloc(kBlock, kBlock)), &std::free);
  const std::lock_guard lock(mutex_);
  for (std::uint64_t b = offset / kBlock; b * kBlock < offset + bytes; ++b) {
    std::memset(block.get(), 0, kBlock);
    if (::pread(fd, block.get(), kBlock, static_cast<off_t>(b * kBlock)) < 0) continue;
    blocks_[{inode, b}].assign(block.get(), block.get() + kBlock);
  }
}

void FormerBlocks::restore(int fd, std::uint64_t offset, std::byte* read, std::size_t bytes,
                           std::uint64_t which) const {
  if (bytes == 0) return;
  const std::uint64_t first = offset / kBlock, count = (offset + bytes - 1) / kBlock - first + 1;
  const std::uint64_t block = first + which % count;
  const std::uint64_t from = std::max(offset, block * kBlock), to = std::min(offset + bytes, (block + 1) * kBlock);
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find({inode_of(fd), block});
  if (found == blocks_.end()) {
    std::memset(read + (from - offset), 0, to - from);
  } else {
    std::memcpy(read + (from - offset), found->second.data() + (from - block * kBlock), to - from);
  }
}

FormerBlocks& former() {
  static FormerBlocks blocks;
  return blocks;
}

Write::Write(int fd, const void* from, std::size_t count, std::uint64_t at)
    : data(static_cast<const std::byte*>(from)), bytes(count), first(count), offset(at) {
  const std::shared_ptr<FaultPlan> plan = faults_in_use();
  if (!plan) return;
  if (plan->has(Kind::kStale)) former().keep(fd, offset, bytes);
  const std::optional<FaultPlan::Fault> fault = plan->next(FaultPlan::On::kWrite);
  if (!fault) return;
  switch (fault->kind) {
    case Kind::kError:
      error = -static_cast<int>(fault->value);
      break;
    case Kind::kShort:
      first = bytes - std::min<std::size_t>(fault->value, bytes - 1);
      break;
    case Kind::kFlip:
      changed_.assign(data, data + bytes);
      flip(changed_.data(), bytes, fault->value);
      data = changed_.data();
      break;
    case Kind::kDelay:
      plan->sleep(*fault);
      break;
    case Kind::kTorn:
      bytes = fault->value % bytes;
      break;
    case Kind::kLost:
      bytes = 0;
      break;
    case Kind::kMisdirected:
      offset = astray(fd, offset, bytes, fault->value);
      break;
    case Kind::kTornCrash:
      bytes /= 2;
      crashes = true;
      break;
    case Kind::kCrash:
      crash_now();
    case Kind::kStale:
      break;
  }
}

Read::Read(int fd, std::size_t count, std::uint64_t at) : bytes(count), offset(at) {
  const std::shared_ptr<FaultPlan> plan = faults_in_use();
  if (!plan) return;
  fault_ = plan->next(FaultPlan::On::kRead);
  if (!fault_) return;
  if (fault_->kind == Kind::kError) error = -static_cast<int>(fault_->value);
  if (fault_->kind == Kind::kShort) bytes -= std::min<std::size_t>(fault_->value, bytes);
  if (fault_->kind == Kind::kDelay) plan->sleep(*fault_);
  if (fault_->kind == Kind::kMisdirected) offset = astray(fd, offset, bytes, fault_->value);
  if (fault_->kind == Kind::kCrash || fault_->kind == Kind::kTornCrash) crash_now();
}

void Read::arrived(int fd, std::byte* data, std::size_t count) const {
  if (!fault_) return;
  if (fault_->kind == Kind::kFlip) flip(data, count, fault_->value);
  if (fault_->kind == Kind::kStale) former().restore(fd, offset, data, count, fault_->value);
}

}  // namespace kvtier::spoil
