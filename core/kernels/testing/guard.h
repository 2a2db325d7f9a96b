// A buffer whose last byte is followed by a page that cannot be touched: one byte too far crashes.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

namespace cpumoe::testing {

class GuardedBuffer {
 public:
  // `bytes` usable bytes that end exactly at the guard page, filled with 0xff (a NaN in any code).
  explicit GuardedBuffer(size_t bytes) : bytes_(bytes) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    mapped_ = (bytes + page - 1) / page * page + page;
    map_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map_ == MAP_FAILED) throw std::bad_alloc();
    char* guard = static_cast<char*>(map_) + mapped_ - page;
    if (mprotect(guard, page, PROT_NONE) != 0) throw std::bad_alloc();
    data_ = guard - bytes;
    std::memset(map_, 0xff, mapped_ - page);
  }
  ~GuardedBuffer() {
    if (map_ != nullptr) munmap(map_, mapped_);
  }
  GuardedBuffer(GuardedBuffer&& o) noexcept
      : map_(std::exchange(o.map_, nullptr)),
        data_(o.data_),
        mapped_(o.mapped_),
        bytes_(o.bytes_) {}
  GuardedBuffer& operator=(GuardedBuffer&& o) noexcept {
    std::swap(map_, o.map_), std::swap(data_, o.data_);
    std::swap(mapped_, o.mapped_), std::swap(bytes_, o.bytes_);
    return *this;
  }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;
  char* data() { return data_; }
  size_t size() const { return bytes_; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }

 private:
  void* map_ = nullptr;
  char* data_ = nullptr;
  size_t mapped_ = 0, bytes_ = 0;
};

// Rounds up to 64 bytes, for operands that must be 64-byte aligned and still end at the guard.
inline size_t guarded_bytes(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace cpumoe::testing
