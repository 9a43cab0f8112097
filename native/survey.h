// Counting a sample of a piece: elements by key, changes by key and step token.
#pragma once

#include "scan.h"

namespace ww {

template <class K>
class Survey {
  public:
    using T = typename K::Bits;
    static constexpr size_t n_keys = K::key_mask + 1;

    // The counts go here; both arrays start out as zeros.
    Survey(int64_t* by_key, int64_t* by_token) : by_key_(by_key), by_token_(by_token) {}

    void add_run(const T* old, const T* now, size_t n) {
        for (size_t first = 0; first < n; first += window_size) {
            const size_t count = std::min(window_size, n - first);
            count_keys(old + first, count);
            count_changes(old + first, now + first, count);
        }
    }

  private:
    // Neighbours tend to share their key: counting in turns, none waits for the one before it.
    void count_keys(const T* old, size_t n) {
        constexpr size_t n_turns = 4;
        uint16_t counts[n_turns][n_keys] = {};
        static_assert(window_size <= UINT16_MAX, "a window's counts fit");
        size_t i = 0;
        for (; i + n_turns <= n; i += n_turns)
            for (size_t t = 0; t < n_turns; t++) counts[t][K::key(old[i + t])]++;
        for (; i < n; i++) counts[0][K::key(old[i])]++;
        for (size_t key = 0; key < n_keys; key++)
            for (size_t t = 0; t < n_turns; t++) by_key_[key] += counts[t][key];
    }

    void count_changes(const T* old, const T* now, size_t n) {
        scan_changes(old, now, n, changed_);
        const uint32_t* stop = list_bits(changed_, (n + block_size - 1) / block_size, 0, listed_);
        for (const uint32_t* at = listed_; at < stop; at++) {
            bool negative;
            const T magnitude = split_step<K>(old[*at], now[*at], negative);
            by_token_[size_t(K::key(old[*at])) * n_tokens + token_of(magnitude)]++;
        }
    }

    int64_t *by_key_, *by_token_;
    uint64_t changed_[window_size / block_size];
    uint32_t listed_[window_size + 2];
};

}  // namespace ww
