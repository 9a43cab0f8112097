// The scan of whole blocks with NEON, for element types whose keys fit a byte.
#pragma once

#include <arm_neon.h>

#include "scan_any.h"

namespace ww {

template <class K>
constexpr bool has_vector_scan = K::key_mask != 0 && K::key_mask <= 0xFF && sizeof(typename K::Bits) <= 4;

// Bit i of the result: is byte i of the four vectors set?
inline uint64_t bits_of_masks(uint8x16_t a, uint8x16_t b, uint8x16_t c, uint8x16_t d) {
    const uint8x16_t place = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t ab = vpaddq_u8(vandq_u8(a, place), vandq_u8(b, place));
    const uint8x16_t cd = vpaddq_u8(vandq_u8(c, place), vandq_u8(d, place));
    const uint8x16_t all = vpaddq_u8(ab, cd);
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(all, all)), 0);
}

// The keys of 8 elements as bytes.
template <class K>
inline uint8x8_t keys8(const typename K::Bits* p) {
    const uint8x8_t mask = vdup_n_u8(K::key_mask);
    if constexpr (sizeof(typename K::Bits) == 1) {
        return vand_u8(vshr_n_u8(vld1_u8(p), K::key_shift), mask);
    } else if constexpr (sizeof(typename K::Bits) == 2) {
        const uint16x8_t bits = vld1q_u16(p);
        if constexpr (K::key_shift > 8) return vand_u8(vmovn_u16(vshrq_n_u16(bits, K::key_shift)), mask);
        else return vand_u8(vshrn_n_u16(bits, K::key_shift), mask);
    } else {
        const uint16x8_t high = vshrn_high_n_u32(vshrn_n_u32(vld1q_u32(p), 16), vld1q_u32(p + 4), 16);
        return vand_u8(vshrn_n_u16(high, K::key_shift - 16), mask);
    }
}

template <class K>
inline uint8x16_t keys16(const typename K::Bits* p) {
    const uint8x16_t mask = vdupq_n_u8(K::key_mask);
    if constexpr (sizeof(typename K::Bits) == 1) {
        return vandq_u8(vshrq_n_u8(vld1q_u8(p), K::key_shift), mask);
    } else if constexpr (sizeof(typename K::Bits) == 2 && K::key_shift == 7) {
        // Doubled, the key is the high byte: unlike shifts, adding and picking bytes run on both vector units.
        const uint16x8_t a = vld1q_u16(p), b = vld1q_u16(p + 8);
        return vandq_u8(vuzp2q_u8(vreinterpretq_u8_u16(vaddq_u16(a, a)), vreinterpretq_u8_u16(vaddq_u16(b, b))), mask);
    } else if constexpr (sizeof(typename K::Bits) == 2) {
        const uint8x16_t a = vreinterpretq_u8_u16(vld1q_u16(p)), b = vreinterpretq_u8_u16(vld1q_u16(p + 8));
        return vandq_u8(vshrq_n_u8(vuzp2q_u8(a, b), K::key_shift - 8), mask);
    } else {
        const uint16x8_t a = vshrn_high_n_u32(vshrn_n_u32(vld1q_u32(p), 16), vld1q_u32(p + 4), 16);
        const uint16x8_t b = vshrn_high_n_u32(vshrn_n_u32(vld1q_u32(p + 8), 16), vld1q_u32(p + 12), 16);
        return vandq_u8(vshrn_high_n_u16(vshrn_n_u16(a, K::key_shift - 16), b, K::key_shift - 16), mask);
    }
}

struct VectorWeights {
    uint8x16_t base, weight_less_one, log2_weight, expected;

    explicit VectorWeights(const Weights& w)
        : base(vdupq_n_u8(uint8_t(std::min(w.base_key, 255u)))), weight_less_one(vld1q_u8(w.weight_less_one)),
          log2_weight(vld1q_u8(w.log2_weight)), expected(vld1q_u8(w.expected)) {}

    // Classes, but for those above 15: a table look-up past its end gives 0, which is right for the
    // last class, whose weight is always 1 and which is never expected to change.
    template <class K>
    uint8x16_t classes16(const typename K::Bits* p) const {
        return vqsubq_u8(keys16<K>(p), base);
    }
    template <class K>
    uint8x8_t classes8(const typename K::Bits* p) const {
        return vqsub_u8(keys8<K>(p), vget_low_u8(base));
    }
};

// Every lane: the sum of the lanes up to and with it.
inline uint16x8_t sums_through(uint16x8_t v) {
    const uint16x8_t zero = vdupq_n_u16(0);
    v = vaddq_u16(v, vextq_u16(zero, v, 7));
    v = vaddq_u16(v, vextq_u16(zero, v, 6));
    return vaddq_u16(v, vextq_u16(zero, v, 4));
}

// Every lane: the sum of the lanes before it.
inline uint16x8_t sums_before(uint16x8_t v) { return sums_through(vextq_u16(vdupq_n_u16(0), v, 7)); }

template <class T>
inline uint8x16_t equal16(const T* a, const T* b) {
    if constexpr (sizeof(T) == 1) {
        return vceqq_u8(vld1q_u8(a), vld1q_u8(b));
    } else if constexpr (sizeof(T) == 2) {
        const uint16x8_t x = vceqq_u16(vld1q_u16(a), vld1q_u16(b));
        const uint16x8_t y = vceqq_u16(vld1q_u16(a + 8), vld1q_u16(b + 8));
        return vuzp1q_u8(vreinterpretq_u8_u16(x), vreinterpretq_u8_u16(y));
    } else if constexpr (sizeof(T) == 4) {
        uint16x8_t half[2];
        for (int h = 0; h < 2; h++) {
            const uint32x4_t x = vceqq_u32(vld1q_u32(a + 8 * h), vld1q_u32(b + 8 * h));
            const uint32x4_t y = vceqq_u32(vld1q_u32(a + 8 * h + 4), vld1q_u32(b + 8 * h + 4));
            half[h] = vuzp1q_u16(vreinterpretq_u16_u32(x), vreinterpretq_u16_u32(y));
        }
        return vuzp1q_u8(vreinterpretq_u8_u16(half[0]), vreinterpretq_u8_u16(half[1]));
    } else {
        uint8_t bytes[16];
        for (int i = 0; i < 16; i++) bytes[i] = a[i] == b[i] ? 0xFF : 0;
        return vld1q_u8(bytes);
    }
}

template <class T>
inline uint64_t changed_block(const T* a, const T* b) {
    return ~bits_of_masks(equal16(a, b), equal16(a + 16, b + 16), equal16(a + 32, b + 32), equal16(a + 48, b + 48));
}

// Leaves the weight of each group, less its eight elements, where its end goes.
template <class K, bool Expected, bool Changes>
inline void scan_block(const typename K::Bits* old, const typename K::Bits* now, const VectorWeights& w,
                       uint16_t* groups, uint64_t* marked) {
    uint16x8_t sums[4];
    uint8x16_t marks[4];
    for (int g = 0; g < 4; g++) {
        const uint8x16_t classes = w.classes16<K>(old + 16 * g);
        sums[g] = vpaddlq_u8(vqtbl1q_u8(w.weight_less_one, classes));
        marks[g] = Expected ? vqtbl1q_u8(w.expected, classes) : vdupq_n_u8(0);
        if constexpr (Changes) marks[g] = vornq_u8(marks[g], equal16(old + 16 * g, now + 16 * g));
    }
    vst1q_u16(groups, vpaddq_u16(vpaddq_u16(sums[0], sums[1]), vpaddq_u16(sums[2], sums[3])));
    *marked = Expected || Changes ? bits_of_masks(marks[0], marks[1], marks[2], marks[3]) : 0;
}

// Sums up in a loop of its own: together, the two chains are too long for the processor to overlap.
template <class K, bool Expected, bool Changes>
void scan_blocks(const typename K::Bits* old, const typename K::Bits* now, size_t n_blocks, const Weights& weights,
                 Window& window) {
    const VectorWeights w(weights);
    for (size_t b = 0; b < n_blocks; b++)
        scan_block<K, Expected, Changes>(old + b * block_size, now + b * block_size, w, window.ends_of_block(b),
                                         window.marked + b);
    const uint16x8_t one_each = {8, 16, 24, 32, 40, 48, 56, 64};
    uint32_t running = window.border[0];
    for (size_t b = 0; b < n_blocks; b++) {
        uint16_t* ends = window.ends_of_block(b);
        const uint16x8_t sums = vaddq_u16(sums_through(vld1q_u16(ends)), one_each);
        vst1q_u16(ends, sums);
        running += vgetq_lane_u16(sums, 7);
        window.border[b + 1] = running;
    }
}

// Scans so many whole blocks, and says how many it did.
template <class K, bool Changes>
size_t scan_blocks(const typename K::Bits* old, const typename K::Bits* now, size_t n_blocks, const Weights& weights,
                   Window& window) {
    if (weights.any_expected) scan_blocks<K, true, Changes>(old, now, n_blocks, weights, window);
    else scan_blocks<K, false, Changes>(old, now, n_blocks, weights, window);
    return n_blocks;
}

// How many of the next eight blocks end at or before the slot.
inline uint32_t blocks_passed(const uint32_t* ends, uint32_t slot) {
    const uint32x4_t wanted = vdupq_n_u32(slot);
    const uint32x4_t a = vcleq_u32(vld1q_u32(ends), wanted), b = vcleq_u32(vld1q_u32(ends + 4), wanted);
    return 0 - vaddvq_u32(vaddq_u32(a, b));
}

// How many of a block's groups end at or before the slot (counted from the block's border).
inline uint32_t groups_passed(const uint16_t* ends, uint32_t slot) {
    const uint16x8_t passed = vcleq_u16(vld1q_u16(ends), vdupq_n_u16(uint16_t(slot)));
    return 0 - uint32_t(int16_t(vaddvq_u16(passed)));
}

template <class K>
inline uint32_t weight_before(const typename K::Bits* group, size_t place, const VectorWeights& w) {
    static const uint64_t before[group_size] = {0,          0xFF,         0xFFFF,         0xFFFFFF,
                                                0xFFFFFFFF, 0xFFFFFFFFFF, 0xFFFFFFFFFFFF, 0xFFFFFFFFFFFFFF};
    const uint8x8_t less_one = vqtbl1_u8(w.weight_less_one, w.classes8<K>(group));
    return vaddlv_u8(vand_u8(less_one, vcreate_u8(before[place]))) + uint32_t(place);
}

// Every lane holds 8 times the slot's distance from its element's start, plus its own number. Starts past
// the slot give huge unsigned numbers, so the smallest is the element's, and says all there is to know.
template <class K>
inline Hit find_in_group(const typename K::Bits* group, uint32_t slot, const VectorWeights& w) {
    const uint8x8_t classes = w.classes8<K>(group);
    const uint64_t log2_weights = vget_lane_u64(vreinterpret_u64_u8(vqtbl1_u8(w.log2_weight, classes)), 0);
    const uint16x8_t seven_each = {0, 7, 14, 21, 28, 35, 42, 49};
    const uint16x8_t wanted = vsubq_u16(vdupq_n_u16(uint16_t(8 * slot)), seven_each);
    const uint16x8_t starts = sums_before(vshll_n_u8(vqtbl1_u8(w.weight_less_one, classes), 3));
    const uint32_t least = vminvq_u16(vsubq_u16(wanted, starts));
    const uint32_t place = least % 8;
    return {place, least / 8, uint32_t(log2_weights >> (8 * place)) & 15};
}

// Finding intervals in a group: with vectors for whole groups, one by one for the tail of a tensor.
template <class K>
class Places {
  public:
    using T = typename K::Bits;

    explicit Places(const Weights& weights) : weights_(weights), vectors_(weights) {}

    uint32_t before(const T* group, size_t place, bool whole) const {
        if constexpr (has_vector_scan<K>)
            if (__builtin_expect(whole, 1)) return weight_before<K>(group, place, vectors_);
        (void)whole;
        return weight_before_any<K>(group, place, weights_);
    }
    Hit find(const T* group, uint32_t slot, bool whole) const {
        if constexpr (has_vector_scan<K>)
            if (__builtin_expect(whole, 1)) return find_in_group<K>(group, slot, vectors_);
        (void)whole;
        return find_in_group_any<K>(group, slot, weights_);
    }

  private:
    const Weights& weights_;
    const VectorWeights vectors_;
};

}  // namespace ww
