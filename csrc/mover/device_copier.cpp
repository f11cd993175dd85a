#include "mover/device_copier.hpp"

#include "copy/checksum.hpp"
#include "copy/page_copy.hpp"

namespace kvtier {

// Each copy is told what follows it, so that the next page's first lines are on their way when it begins.

void CpuCopier::gather(std::span<PageCopy> pages, unsigned) {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    PageCopy& page = pages[i];
    const Slot next = i + 1 < pages.size() ? pages[i + 1].device : kNoSlot;
    page.checksum = kvtier::gather(device_, page.device, host_.page(page.host), host_.page_bytes(), page.key, next);
    page.status = PageStatus::kOk;
  }
}

void CpuCopier::scatter(std::span<PageCopy> pages, ByteRange range, unsigned) {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    PageCopy& page = pages[i];
    const std::byte* bytes = host_.page(page.host);
    // Looked at before the device is written, so that a bad page leaves the device block alone.
    if (page.checksum != 0 && checksum(bytes, device_.payload_bytes(), page.key) != page.checksum) {
      page.status = PageStatus::kCorrupt;
      continue;
    }
    const std::byte* next = i + 1 < pages.size() ? host_.page(pages[i + 1].host) : nullptr;
    kvtier::scatter(bytes, device_, page.device, range, next);
    page.status = PageStatus::kOk;
  }
}

}  // namespace kvtier
