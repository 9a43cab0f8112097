// One pass over a chunk's old bits: the running weight at every 16th element, and the elements that
// are expected to change. This is all that locating an event needs; nothing is kept per element.
#pragma once

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

// Per class: weight and expectation, and the same split into byte tables for vector look-ups.
struct Weights {
    uint32_t base_key;
    uint32_t weight[n_classes];
    uint8_t log2_weight[n_classes];
    uint8_t low[n_classes], high[n_classes], expected[n_classes];
    bool any_high = false, any_expected = false;

    explicit Weights(const Model& model) : base_key(model.base_key) {
        for (int c = 0; c < n_classes; c++) {
            log2_weight[c] = model.log2_weight[c];
            weight[c] = 1u << model.log2_weight[c];
            low[c] = uint8_t(weight[c]);
            high[c] = uint8_t(weight[c] >> 8);
            expected[c] = model.expected[c] ? 0xFF : 0;
            any_high |= high[c] != 0;
            any_expected |= model.expected[c];
        }
    }
    uint32_t class_of_key(uint32_t key) const {
        const uint32_t above = key > base_key ? key - base_key : 0;
        return above < n_classes - 1 ? above : n_classes - 1;
    }
};

// What a scan leaves behind; reused from chunk to chunk.
struct Scan {
    std::vector<uint32_t> group_end;  // running weight after each group of 16
    std::vector<uint64_t> expected;   // one bit per element, 64 to a block
    std::vector<uint64_t> changed;    // the same, when encoding

    void resize(size_t n) {
        const size_t n_blocks = (n + block_size - 1) / block_size;
        group_end.resize(n_blocks * (block_size / group_size));
        expected.resize(n_blocks);
        changed.resize(n_blocks);
    }
};

// ------------------------------------------------------------------------------ any number of elements

template <class K>
inline uint32_t scan_block_any(const typename K::Bits* old, size_t n, const Weights& weights,
                               uint32_t running, uint32_t* group_end, uint64_t* expected) {
    uint64_t mask = 0;
    for (size_t g = 0; g < block_size / group_size; g++) {
        for (size_t i = g * group_size; i < (g + 1) * group_size && i < n; i++) {
            const uint32_t c = weights.class_of_key(K::key(old[i]));
            running += weights.weight[c];
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
    uint8x16_t base, top, low, high, expected;

    explicit VectorWeights(const Weights& w)
        : base(vdupq_n_u8(uint8_t(w.base_key))), top(vdupq_n_u8(n_classes - 1)), low(vld1q_u8(w.low)),
          high(vld1q_u8(w.high)), expected(vld1q_u8(w.expected)) {}

    template <class K>
    uint8x16_t classes16(const typename K::Bits* p) const {
        return vminq_u8(vqsubq_u8(keys16<K>(p), base), top);
    }
};

// Sums of four groups of 16 bytes, as four words.
inline uint32x4_t group_sums(uint8x16_t a, uint8x16_t b, uint8x16_t c, uint8x16_t d) {
    const uint16x8_t ab = vpaddq_u16(vpaddlq_u8(a), vpaddlq_u8(b));
    const uint16x8_t cd = vpaddq_u16(vpaddlq_u8(c), vpaddlq_u8(d));
    return vpaddlq_u16(vpaddq_u16(ab, cd));
}

inline uint32x4_t inclusive_prefix(uint32x4_t v) {
    const uint32x4_t zero = vdupq_n_u32(0);
    v = vaddq_u32(v, vextq_u32(zero, v, 3));
    return vaddq_u32(v, vextq_u32(zero, v, 2));
}

template <class K, bool High, bool Expected>
inline uint32x4_t scan_block(const typename K::Bits* old, const VectorWeights& w, uint32x4_t running,
                             uint32_t* group_end, uint64_t* expected) {
    uint8x16_t c[4];
    for (int g = 0; g < 4; g++) c[g] = w.classes16<K>(old + 16 * g);
    uint32x4_t sums = group_sums(vqtbl1q_u8(w.low, c[0]), vqtbl1q_u8(w.low, c[1]),
                                 vqtbl1q_u8(w.low, c[2]), vqtbl1q_u8(w.low, c[3]));
    if (High) {
        const uint32x4_t high = group_sums(vqtbl1q_u8(w.high, c[0]), vqtbl1q_u8(w.high, c[1]),
                                           vqtbl1q_u8(w.high, c[2]), vqtbl1q_u8(w.high, c[3]));
        sums = vaddq_u32(sums, vshlq_n_u32(high, 8));
    }
    const uint32x4_t ends = vaddq_u32(inclusive_prefix(sums), running);
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

#else

template <class K>
constexpr bool has_vector_keys = false;

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

// ------------------------------------------------------------------------------------------ whole chunks

#ifdef WW_NEON
template <class K, bool High, bool Expected>
uint32_t scan_blocks(const typename K::Bits* old, size_t n_blocks, const Weights& weights, Scan& scan) {
    const VectorWeights w(weights);
    uint32x4_t running = vdupq_n_u32(0);
    for (size_t b = 0; b < n_blocks; b++)
        running = scan_block<K, High, Expected>(old + b * block_size, w, running,
                                                &scan.group_end[4 * b], &scan.expected[b]);
    return vgetq_lane_u32(running, 0);
}
#endif

// Fills group_end and expected; gives the chunk's total weight.
template <class K>
uint32_t scan_weights(const typename K::Bits* old, size_t n, const Weights& weights, Scan& scan) {
    scan.resize(n);
    size_t b = 0;
    uint32_t running = 0;
#ifdef WW_NEON
    if constexpr (has_vector_keys<K>) {
        b = n / block_size;
        if (weights.any_high)
            running = weights.any_expected ? scan_blocks<K, true, true>(old, b, weights, scan)
                                           : scan_blocks<K, true, false>(old, b, weights, scan);
        else
            running = weights.any_expected ? scan_blocks<K, false, true>(old, b, weights, scan)
                                           : scan_blocks<K, false, false>(old, b, weights, scan);
    }
#endif
    for (; b * block_size < n; b++) {
        const size_t left = n - b * block_size;
        running = scan_block_any<K>(old + b * block_size, left < block_size ? left : block_size, weights,
                                    running, &scan.group_end[4 * b], &scan.expected[b]);
    }
    return running;
}

// Fills changed; gives the number of changed elements.
template <class T>
size_t scan_changes(const T* old, const T* now, size_t n, Scan& scan) {
    scan.resize(n);
    size_t count = 0, b = 0;
    for (; (b + 1) * block_size <= n; b++) {
        scan.changed[b] = changed_block(old + b * block_size, now + b * block_size);
        count += size_t(__builtin_popcountll(scan.changed[b]));
    }
    if (b * block_size < n) {
        scan.changed[b] = changed_block_any(old + b * block_size, now + b * block_size, n - b * block_size);
        count += size_t(__builtin_popcountll(scan.changed[b]));
    }
    return count;
}

}  // namespace ww
