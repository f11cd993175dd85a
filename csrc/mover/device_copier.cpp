#include "mover/device_copier.hpp"

#include "copy/checksum.hpp"
#include "copy/page_copy.hpp"

namespace kvtier {

void CpuCopier::gather(std::span<PageCopy> pages, unsigned) {
  for (PageCopy& page : pages) {
    page.checksum = kvtier::gather(device_, page.device, host_.page(page.host), host_.page_bytes(), page.key);
    page.status = PageStatus::kOk;
  }
}

void CpuCopier::scatter(std::span<PageCopy> pages, unsigned) {
  for (PageCopy& page : pages) {
    const std::byte* bytes = host_.page(page.host);
    // Looked at before the device is written, so that a bad page leaves the device block alone.
    if (page.checksum != 0 && checksum(bytes, device_.payload_bytes(), page.key) != page.checksum) {
      page.status = PageStatus::kCorrupt;
      continue;
    }
    kvtier::scatter(bytes, device_, page.device);
    page.status = PageStatus::kOk;
  }
}

}  // namespace kvtier
