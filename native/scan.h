// One pass over a window of old bits (and new bits, when encoding): the running weight at every block
// of 64 and every group of 8, and which elements to look at. Nothing is kept per element.
#pragma once

#if defined(__ARM_NEON) && defined(__aarch64__)
#include "scan_neon.h"
#elif defined(__x86_64__)
#include "scan_x86.h"
#else
#include "scan_scalar.h"
#endif

namespace ww {

// Fills a window; gives the running weight after it. With `now`, changed elements are marked as well.
template <class K, bool Changes>
uint32_t scan_window(const typename K::Bits* old, const typename K::Bits* now, size_t n, const Weights& weights,
                     uint32_t running, Window& window) {
    window.border[0] = running;
    size_t b = 0;
    if constexpr (has_vector_scan<K>) b = scan_blocks<K, Changes>(old, now, n / block_size, weights, window);
    for (; b * block_size < n; b++)
        scan_block_any<K, Changes>(old + b * block_size, now + b * block_size, std::min(block_size, n - b * block_size),
                                   weights, window, b);
    window.close(b);
    return window.border[b];
}

// Lists the places of the bits set in the masks of consecutive blocks. Two are written at a time, wanted
// or not: how many there are is too random to branch on. The list needs room for two more.
inline uint32_t* list_bits(const uint64_t* masks, size_t n_blocks, uint32_t first, uint32_t* out) {
    constexpr uint64_t stop = uint64_t(1) << 63;
    for (size_t b = 0; b < n_blocks; b++, first += block_size) {
        uint64_t mask = masks[b];
        do {
            const uint64_t rest = mask & (mask - 1);
            out[0] = first + uint32_t(__builtin_ctzll(mask | stop));
            out[1] = first + uint32_t(__builtin_ctzll(rest | stop));
            out += (mask != 0) + (rest != 0);
            mask = rest & (rest - 1);
        } while (__builtin_expect(mask != 0, 0));
    }
    return out;
}

// Fills changed, one bit per element; gives the number of changed elements.
template <class T>
size_t scan_changes(const T* old, const T* now, size_t n, uint64_t* changed) {
    size_t count = 0, b = 0;
    for (; (b + 1) * block_size <= n; b++) {
        changed[b] = changed_block(old + b * block_size, now + b * block_size);
        count += size_t(__builtin_popcountll(changed[b]));
    }
    if (b * block_size < n) {
        changed[b] = changed_block_any(old + b * block_size, now + b * block_size, n - b * block_size);
        count += size_t(__builtin_popcountll(changed[b]));
    }
    return count;
}

}  // namespace ww
