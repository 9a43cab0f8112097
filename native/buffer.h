// Scratch memory of the inner loops.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>

namespace ww {

// Memory that grows and is never cleared: filling with zeros what is then written costs a tenth of a pass.
template <class T>
class Buffer {
  public:
    T* data() { return items_.get(); }
    const T* data() const { return items_.get(); }
    T& operator[](size_t i) { return items_[i]; }

    // Room for n items, of which the first n_used are kept.
    void make_room(size_t n_used, size_t n) {
        if (n <= size_) return;
        size_ = n + n / 2;
        std::unique_ptr<T[]> larger(new T[size_]);
        if (n_used) std::copy(items_.get(), items_.get() + n_used, larger.get());
        items_.swap(larger);
    }

  private:
    std::unique_ptr<T[]> items_;
    size_t size_ = 0;
};

}  // namespace ww
