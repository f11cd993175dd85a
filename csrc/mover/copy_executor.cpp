#include "mover/copy_executor.hpp"

namespace kvtier {

CopyExecutor::CopyExecutor(Scheduler& scheduler, HostArena& host, std::unique_ptr<DeviceCopier> copier,
                           unsigned threads, bool verify_host)
    : scheduler_(scheduler), host_(host), copier_(std::move(copier)), verify_host_(verify_host) {
  threads_.reserve(threads);
  for (unsigned worker = 0; worker < threads; ++worker) threads_.emplace_back([this, worker] { run(worker); });
}

void CopyExecutor::join() {
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void CopyExecutor::run(unsigned worker) {
  Chunk chunk;
  PageStatus status[Chunk::kMaxPages];
  while (scheduler_.take_copy(&chunk)) {
    chunk.lane == Lane::kOffload ? offload(chunk, worker, status) : onboard(chunk, worker, status);
    scheduler_.finish(*chunk.transfer, chunk.hop, {chunk.pages, chunk.count}, status);
  }
}

void CopyExecutor::offload(const Chunk& chunk, unsigned worker, PageStatus* status) {
  PageCopy pages[Chunk::kMaxPages];
  const Transfer& t = *chunk.transfer;
  for (std::uint32_t i = 0; i < chunk.count; ++i) {
    const std::uint32_t page = chunk.pages[i];
    pages[i].device = t.slot(chunk.hop, page);
    pages[i].host = t.slot(chunk.hop + 1, page);
    pages[i].key = checksum_key(*t.identity(page));
    host_.checksum(pages[i].host) = 0;
  }
  copier_->gather({pages, chunk.count}, worker);
  for (std::uint32_t i = 0; i < chunk.count; ++i) {
    status[i] = pages[i].status;
    if (status[i] == PageStatus::kOk) host_.checksum(pages[i].host) = pages[i].checksum;
  }
}

void CopyExecutor::onboard(const Chunk& chunk, unsigned worker, PageStatus* status) {
  PageCopy pages[Chunk::kMaxPages];
  std::uint32_t count = 0, index[Chunk::kMaxPages];
  const Transfer& t = *chunk.transfer;
  const bool verify = verify_host_ && chunk.hop == 0;  // a later hop's page was verified when it was read
  for (std::uint32_t i = 0; i < chunk.count; ++i) {
    const std::uint32_t page = chunk.pages[i];
    PageCopy& copy = pages[count];
    copy = {t.slot(chunk.hop + 1, page), t.slot(chunk.hop, page), checksum_key(*t.identity(page)), 0,
            PageStatus::kPending};
    if (verify) copy.checksum = host_.checksum(copy.host);
    if (verify && copy.checksum == 0) {  // nothing vouches for this page
      status[i] = PageStatus::kCorrupt;
      continue;
    }
    index[count++] = i;
  }
  copier_->scatter({pages, count}, worker);
  for (std::uint32_t i = 0; i < count; ++i) status[index[i]] = pages[i].status;
}

}  // namespace kvtier
