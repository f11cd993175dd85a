#include "mover/page_batch.hpp"

namespace kvtier {

void PageBatch::prepare(HostArena& host, bool verify_host) {
  const Transfer& t = *chunk.transfer;
  const bool store = chunk.lane == Lane::kOffload;
  // Once: of a later hop the page was verified when it was read, of a later slice with the first one.
  const bool verify = verify_host && !store && chunk.hop == 0 && chunk.slice == 0;
  payload = host.payload_bytes();
  count = 0;
  for (std::uint32_t i = 0; i < chunk.count; ++i) {
    const std::uint32_t page = chunk.pages[i];
    const Slot from = t.slot(chunk.hop, page), to = t.slot(chunk.hop + 1, page);
    PageCopy& copy = pages[count];
    copy = {store ? from : to, store ? to : from, checksum_key(*t.identity(page)), 0, PageStatus::kPending};
    if (store) host.checksum(copy.host) = 0;
    if (verify) copy.checksum = host.checksum(copy.host);
    if (verify && copy.checksum == 0) {  // nothing vouches for this page
      status[i] = PageStatus::kCorrupt;
      continue;
    }
    index[count++] = i;
  }
}

ByteRange PageBatch::range() const {
  const Slices& slices = chunk.transfer->slices;
  return slices.cut() ? slices.range(chunk.slice) : ByteRange{0, payload};
}

void PageBatch::conclude(HostArena& host) {
  for (std::uint32_t i = 0; i < count; ++i) {
    status[index[i]] = pages[i].status;
    if (chunk.lane == Lane::kOffload && pages[i].status == PageStatus::kOk) {
      host.checksum(pages[i].host) = pages[i].checksum;
    }
  }
}

}  // namespace kvtier
