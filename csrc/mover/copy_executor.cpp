#include "mover/copy_executor.hpp"

#include "mover/page_batch.hpp"

namespace kvtier {

CopyExecutor::CopyExecutor(Scheduler& scheduler, HostArena& host, std::unique_ptr<DeviceCopier> copier,
                           unsigned threads, bool verify_host)
    : scheduler_(scheduler), host_(host), copier_(std::move(copier)), verify_host_(verify_host), wanted_(threads) {
  threads_.reserve(threads);
  for (unsigned worker = 0; worker < threads; ++worker) {
    try {
      threads_.emplace_back([this, worker] { run(worker); });
    } catch (const std::exception&) {  // fewer will do, none will not
      if (threads_.empty()) throw;
      break;
    }
  }
}

std::string CopyExecutor::note() const {
  if (threads_.size() == wanted_) return {};
  return "only " + std::to_string(threads_.size()) + " of " + std::to_string(wanted_) + " copy threads could be had";
}

void CopyExecutor::join() {
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void CopyExecutor::run(unsigned worker) {
  PageBatch batch;
  while (scheduler_.take_copy(&batch.chunk)) {
    batch.prepare(host_, verify_host_);
    batch.chunk.lane == Lane::kOffload ? copier_->gather(batch.copies(), worker)
                                       : copier_->scatter(batch.copies(), batch.range(), worker);
    batch.conclude(host_);
    scheduler_.finish(batch.chunk, batch.status);
  }
}

}  // namespace kvtier
