// Anonymous memory of a fixed size: page-aligned, zero, huge pages where the system has them, committed when touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace octavo {

class Memory {
  public:
    Memory() = default;
    explicit Memory(int64_t size) : size_(size) {
        if (size == 0) return;
#if defined(__linux__)
        void* pages = mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (pages == MAP_FAILED) throw std::bad_alloc();
        if (size >= kHugePage) madvise(pages, static_cast<size_t>(size), MADV_HUGEPAGE);
        data_ = static_cast<uint8_t*>(pages);
#else
        const size_t padded = (static_cast<size_t>(size) + 4095) / 4096 * 4096;
        data_ = static_cast<uint8_t*>(std::aligned_alloc(4096, padded));
        if (data_ == nullptr) throw std::bad_alloc();
        std::memset(data_, 0, padded);
#endif
    }
    ~Memory() {
        if (data_ == nullptr) return;
#if defined(__linux__)
        munmap(data_, static_cast<size_t>(size_));
#else
        std::free(data_);
#endif
    }
    Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    Memory& operator=(Memory&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }

    uint8_t* data() const { return data_; }
    int64_t size() const { return size_; }

  private:
    static constexpr int64_t kHugePage = 2 << 20;
    uint8_t* data_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace octavo
