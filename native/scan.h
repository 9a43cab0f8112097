// One pass over a chunk's old bits: the running weight at every 16th element, and the elements that
// are expected to change. This is all that locating an event needs; nothing is kept per element.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "elements.h"
#include "tables.h"

#if defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define WW_NEON 1
#endif

namespace ww {

constexpr size_t group_size = 16;
constexpr size_t block_size = 64;

// Groups are searched so many at a time.
constexpr size_t groups_at_once = 16;

// Scans run over windows that stay in the first-level cache until their events are dealt with.
constexpr size_t window_size = 4096;

// Per class: weight and expectation, as tables for scalar and for vector look-ups.
struct Weights {
    uint32_t base_key;
    uint8_t log2_weight[n_classes];
    uint8_t weight_less_one[n_classes];
    uint8_t expected[n_classes];
    bool any_expected = false;
    std::vector<uint8_t> class_of_key;

    Weights(const Model& model, uint32_t key_mask) : base_key(model.base_key), class_of_key(key_mask + 1) {
        for (int c = 0; c < n_classes; c++) {
            log2_weight[c] = model.log2_weight[c];
            weight_less_one[c] = uint8_t((1u << model.log2_weight[c]) - 1);
            expected[c] = model.expected[c] ? 0xFF : 0;
            any_expected |= model.expected[c];
        }
        for (uint32_t key = 0; key <= key_mask; key++) {
            const uint32_t above = key > base_key ? key - base_key : 0;
            class_of_key[key] = uint8_t(std::min<uint32_t>(above, n_classes - 1));
        }
    }
};

// What a scan of a window leaves behind.
struct Window {
    uint32_t group_end[window_size / group_size + groups_at_once];  // running weight after each group of 16
    uint64_t expected[window_size / block_size];       // one bit per element, 64 to a block
    uint64_t changed[window_size / block_size];        // the same, when encoding

    // A few more that no slot passes, so that a search needs no bound.
    void close(size_t n_blocks) {
        for (size_t g = 0; g < groups_at_once; g++) group_end[4 * n_blocks + g] = UINT32_MAX;
    }
};

// ------------------------------------------------------------------------------ any number of elements

template <class K>
inline uint32_t scan_block_any(const typename K::Bits* old, size_t n, const Weights& weights,
                               uint32_t running, uint32_t* group_end, uint64_t* expected) {
    uint64_t mask = 0;
    for (size_t g = 0; g < block_size / group_size; g++) {
        for (size_t i = g * group_size; i < (g + 1) * group_size && i < n; i++) {
            const uint32_t c = weights.class_of_key[K::key(old[i])];
            running += 1u << weights.log2_weight[c];
            mask |= uint64_t(weights.expected[c] & 1) << i;
        }
        group_end[g] = running;
    }
    *expected = mask;
    return running;
}

template <class T>
inline uint64_t changed_block_any(const T* a, const T* b, size_t n) {
    uint64_t mask = 0;
    for (size_t i = 0; i < n; i++) mask |= uint64_t(a[i] != b[i]) << i;
    return mask;
}

// Where a slot falls: the element's place in its group, and its interval.
struct Hit {
    uint32_t place, start, log2_weight;
};

template <class K>
inline uint32_t weight_before_any(const typename K::Bits* group, size_t place, const Weights& weights) {
    uint32_t sum = 0;
    for (size_t i = 0; i < place; i++) sum += 1u << weights.log2_weight[weights.class_of_key[K::key(group[i])]];
    return sum;
}

template <class K>
inline Hit find_in_group_any(const typename K::Bits* group, uint32_t slot, const Weights& weights) {
    uint32_t start = 0, place = 0;
    uint32_t log2_weight = weights.log2_weight[weights.class_of_key[K::key(group[0])]];
    while (start + (1u << log2_weight) <= slot) {
        start += 1u << log2_weight;
        log2_weight = weights.log2_weight[weights.class_of_key[K::key(group[++place])]];
    }
    return {place, start, log2_weight};
}

// ------------------------------------------------------------------------------------ whole blocks, NEON

#ifdef WW_NEON

inline uint64_t bits_of_masks(uint8x16_t a, uint8x16_t b, uint8x16_t c, uint8x16_t d) {
    const uint8x16_t place = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t ab = vpaddq_u8(vandq_u8(a, place), vandq_u8(b, place));
    const uint8x16_t cd = vpaddq_u8(vandq_u8(c, place), vandq_u8(d, place));
    const uint8x16_t all = vpaddq_u8(ab, cd);
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(all, all)), 0);
}

// The keys of 16 elements as bytes; only for keys of at most 8 bits.
template <class K>
inline uint8x16_t keys16(const typename K::Bits* p) {
    if constexpr (sizeof(typename K::Bits) == 1) {
        return vandq_u8(vshrq_n_u8(vld1q_u8(p), K::key_shift), vdupq_n_u8(K::key_mask));
    } else if constexpr (sizeof(typename K::Bits) == 2 && K::key_mask == 0xFF) {
        return vshrn_high_n_u16(vshrn_n_u16(vld1q_u16(p), K::key_shift), vld1q_u16(p + 8), K::key_shift);
    } else if constexpr (sizeof(typename K::Bits) == 2) {
        const uint16x8_t mask = vdupq_n_u16(K::key_mask);
        const uint16x8_t a = vandq_u16(vshrq_n_u16(vld1q_u16(p), K::key_shift), mask);
        const uint16x8_t b = vandq_u16(vshrq_n_u16(vld1q_u16(p + 8), K::key_shift), mask);
        return vuzp1q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b));
    } else {
        const uint16x8_t a = vshrn_high_n_u32(vshrn_n_u32(vld1q_u32(p), 16), vld1q_u32(p + 4), 16);
        const uint16x8_t b = vshrn_high_n_u32(vshrn_n_u32(vld1q_u32(p + 8), 16), vld1q_u32(p + 12), 16);
        return vshrn_high_n_u16(vshrn_n_u16(a, K::key_shift - 16), b, K::key_shift - 16);
    }
}

template <class K>
constexpr bool has_vector_keys = K::key_mask != 0 && K::key_mask <= 0xFF && sizeof(typename K::Bits) <= 4;

struct VectorWeights {
    uint8x16_t base, weight_less_one, expected;

    explicit VectorWeights(const Weights& w)
        : base(vdupq_n_u8(uint8_t(w.base_key))), weight_less_one(vld1q_u8(w.weight_less_one)),
          expected(vld1q_u8(w.expected)) {}

    // Classes, but for those above 15: a table look-up past its end gives 0, which is right for the
    // last class, whose weight is always 1 and which is never expected to change.
    template <class K>
    uint8x16_t classes16(const typename K::Bits* p) const {
        return vqsubq_u8(keys16<K>(p), base);
    }
};

inline uint32x4_t inclusive_prefix(uint32x4_t v) {
    const uint32x4_t zero = vdupq_n_u32(0);
    v = vaddq_u32(v, vextq_u32(zero, v, 3));
    return vaddq_u32(v, vextq_u32(zero, v, 2));
}

template <class K, bool Expected>
inline uint32x4_t scan_block(const typename K::Bits* old, const VectorWeights& w, uint32x4_t running,
                             uint32_t* group_end, uint64_t* expected) {
    uint8x16_t c[4];
    uint16x8_t sums[4];
    for (int g = 0; g < 4; g++) {
        c[g] = w.classes16<K>(old + 16 * g);
        sums[g] = vpaddlq_u8(vqtbl1q_u8(w.weight_less_one, c[g]));
    }
    const uint16x8_t pairs = vpaddq_u16(vpaddq_u16(sums[0], sums[1]), vpaddq_u16(sums[2], sums[3]));
    const uint32x4_t one_each = {group_size, 2 * group_size, 3 * group_size, 4 * group_size};
    const uint32x4_t ends = vaddq_u32(vaddq_u32(inclusive_prefix(vpaddlq_u16(pairs)), one_each), running);
    vst1q_u32(group_end, ends);
    *expected = !Expected ? 0
                          : bits_of_masks(vqtbl1q_u8(w.expected, c[0]), vqtbl1q_u8(w.expected, c[1]),
                                          vqtbl1q_u8(w.expected, c[2]), vqtbl1q_u8(w.expected, c[3]));
    return vdupq_laneq_u32(ends, 3);
}

template <class T>
inline uint8x16_t differ16(const T* a, const T* b) {
    if constexpr (sizeof(T) == 1) {
        return vmvnq_u8(vceqq_u8(vld1q_u8(a), vld1q_u8(b)));
    } else if constexpr (sizeof(T) == 2) {
        const uint16x8_t x = vceqq_u16(vld1q_u16(a), vld1q_u16(b));
        const uint16x8_t y = vceqq_u16(vld1q_u16(a + 8), vld1q_u16(b + 8));
        return vmvnq_u8(vuzp1q_u8(vreinterpretq_u8_u16(x), vreinterpretq_u8_u16(y)));
    } else if constexpr (sizeof(T) == 4) {
        uint16x8_t half[2];
        for (int h = 0; h < 2; h++) {
            const uint32x4_t x = vceqq_u32(vld1q_u32(a + 8 * h), vld1q_u32(b + 8 * h));
            const uint32x4_t y = vceqq_u32(vld1q_u32(a + 8 * h + 4), vld1q_u32(b + 8 * h + 4));
            half[h] = vuzp1q_u16(vreinterpretq_u16_u32(x), vreinterpretq_u16_u32(y));
        }
        return vmvnq_u8(vuzp1q_u8(vreinterpretq_u8_u16(half[0]), vreinterpretq_u8_u16(half[1])));
    } else {
        uint8_t bytes[16];
        for (int i = 0; i < 16; i++) bytes[i] = a[i] != b[i] ? 0xFF : 0;
        return vld1q_u8(bytes);
    }
}

template <class T>
inline uint64_t changed_block(const T* a, const T* b) {
    return bits_of_masks(differ16(a, b), differ16(a + 16, b + 16), differ16(a + 32, b + 32),
                         differ16(a + 48, b + 48));
}

// The sum of the weights of the elements before a place in their group.
template <class K>
inline uint32_t weight_before(const typename K::Bits* group, size_t place, const VectorWeights& w) {
    const uint8x16_t lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const uint8x16_t less_one = vqtbl1q_u8(w.weight_less_one, w.classes16<K>(group));
    const uint8x16_t before = vcltq_u8(lanes, vdupq_n_u8(uint8_t(place)));
    return vaddlvq_u8(vandq_u8(less_one, before)) + uint32_t(place);
}

inline uint16x8_t inclusive_prefix(uint16x8_t v) {
    const uint16x8_t zero = vdupq_n_u16(0);
    v = vaddq_u16(v, vextq_u16(zero, v, 7));
    v = vaddq_u16(v, vextq_u16(zero, v, 6));
    return vaddq_u16(v, vextq_u16(zero, v, 4));
}

// The element of a group whose interval holds the slot (counted from the group's start).
template <class K>
inline Hit find_in_group(const typename K::Bits* group, uint32_t slot, const VectorWeights& w) {
    const uint8x16_t less_one = vqtbl1q_u8(w.weight_less_one, w.classes16<K>(group));
    const uint16x8_t one = vdupq_n_u16(1);
    const uint16x8_t a = inclusive_prefix(vaddw_u8(one, vget_low_u8(less_one)));
    const uint16x8_t b = vaddq_u16(inclusive_prefix(vaddw_high_u8(one, less_one)), vdupq_laneq_u16(a, 7));
    const uint16x8_t wanted = vdupq_n_u16(uint16_t(slot));
    const uint16x8_t past_a = vcleq_u16(a, wanted), past_b = vcleq_u16(b, wanted);
    const uint32_t place = vaddvq_u16(vsubq_u16(vdupq_n_u16(0), vaddq_u16(past_a, past_b)));
    const uint32_t start = vmaxvq_u16(vmaxq_u16(vandq_u16(a, past_a), vandq_u16(b, past_b)));
    const uint32_t end = vminvq_u16(vminq_u16(vorrq_u16(a, past_a), vorrq_u16(b, past_b)));
    return {place, start, 31 - uint32_t(__builtin_clz(end - start))};
}

// How many of the next sixteen groups end at or before the slot.
inline uint32_t groups_passed(const uint32_t* group_end, uint32_t slot) {
    const uint32x4_t wanted = vdupq_n_u32(slot);
    const uint32x4_t a = vcleq_u32(vld1q_u32(group_end), wanted);
    const uint32x4_t b = vcleq_u32(vld1q_u32(group_end + 4), wanted);
    const uint32x4_t c = vcleq_u32(vld1q_u32(group_end + 8), wanted);
    const uint32x4_t d = vcleq_u32(vld1q_u32(group_end + 12), wanted);
    return uint32_t(-int32_t(vaddvq_u32(vaddq_u32(vaddq_u32(a, b), vaddq_u32(c, d)))));
}

#else

template <class K>
constexpr bool has_vector_keys = false;

inline uint32_t groups_passed(const uint32_t* group_end, uint32_t slot) {
    uint32_t passed = 0;
    for (size_t g = 0; g < groups_at_once; g++) passed += group_end[g] <= slot;
    return passed;
}

template <class T>
inline uint64_t changed_block(const T* a, const T* b) {
    uint8_t differ[block_size];
    for (size_t i = 0; i < block_size; i++) differ[i] = a[i] != b[i];
    uint64_t mask = 0;
    for (size_t g = 0; g < 8; g++) {
        uint64_t bytes;
        std::memcpy(&bytes, differ + 8 * g, 8);
        mask |= ((bytes * 0x0102040810204080ull) >> 56) << (8 * g);
    }
    return mask;
}

#endif

// ----------------------------------------------------------------------------------------- whole windows

#ifdef WW_NEON
template <class K, bool Expected>
uint32_t scan_blocks(const typename K::Bits* old, size_t n_blocks, const Weights& weights, uint32_t start,
                     Window& window) {
    const VectorWeights w(weights);
    uint32x4_t running = vdupq_n_u32(start);
    for (size_t b = 0; b < n_blocks; b++)
        running = scan_block<K, Expected>(old + b * block_size, w, running, window.group_end + 4 * b,
                                          window.expected + b);
    return vgetq_lane_u32(running, 0);
}
#endif

// Fills group_end and expected; gives the running weight after the window.
template <class K>
uint32_t scan_weights(const typename K::Bits* old, size_t n, const Weights& weights, uint32_t running,
                      Window& window) {
    size_t b = 0;
#ifdef WW_NEON
    if constexpr (has_vector_keys<K>) {
        b = n / block_size;
        running = weights.any_expected ? scan_blocks<K, true>(old, b, weights, running, window)
                                       : scan_blocks<K, false>(old, b, weights, running, window);
    }
#endif
    for (; b * block_size < n; b++)
        running = scan_block_any<K>(old + b * block_size, std::min(block_size, n - b * block_size), weights,
                                    running, window.group_end + 4 * b, window.expected + b);
    window.close(b);
    return running;
}

// Lists the places of the bits set in the masks of consecutive blocks. Two are written at a time, wanted
// or not: how many there are is too random to branch on. The list needs room for one more.
inline uint32_t* list_bits(const uint64_t* masks, size_t n_blocks, uint32_t first, uint32_t* out) {
    for (size_t b = 0; b < n_blocks; b++, first += block_size) {
        uint64_t mask = masks[b];
        const int count = __builtin_popcountll(mask);
        for (int done = 0;; done += 2) {
            const uint64_t rest = mask & (mask - 1);
            out[done] = first + uint32_t(__builtin_ctzll(mask | uint64_t(1) << 63));
            out[done + 1] = first + uint32_t(__builtin_ctzll(rest | uint64_t(1) << 63));
            mask = rest & (rest - 1);
            if (__builtin_expect(mask == 0 || rest == 0, 1)) break;
        }
        out += count;
    }
    return out;
}

// Fills changed; gives the number of changed elements.
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
