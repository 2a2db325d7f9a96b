// An owning, 64-byte aligned, grow-only byte buffer. Growing discards the contents.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

namespace cpumoe {

class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t bytes) { reserve(bytes); }
  AlignedBuffer(AlignedBuffer&& o) noexcept { swap(o); }
  AlignedBuffer& operator=(AlignedBuffer&& o) noexcept {
    swap(o);
    return *this;
  }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  ~AlignedBuffer() { std::free(data_); }

  void* reserve(size_t bytes) {
    if (bytes > size_) {
      const size_t n = (bytes + 63) / 64 * 64;
      void* p = std::aligned_alloc(64, n);
      if (p == nullptr) throw std::bad_alloc();
      std::free(data_);
      data_ = p;
      size_ = n;
    }
    return data_;
  }
  template <class T>
  T* reserve_as(size_t count) {
    return static_cast<T*>(reserve(count * sizeof(T)));
  }
  void* data() { return data_; }
  size_t size() const { return size_; }

 private:
  void swap(AlignedBuffer& o) {
    std::swap(data_, o.data_);
    std::swap(size_, o.size_);
  }
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace cpumoe
