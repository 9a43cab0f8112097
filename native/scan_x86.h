// The scan of whole blocks on x86-64, for element types whose keys fit a byte. Chosen when the program
// runs: a wheel is built for every x86-64, and byte look-ups came later (SSSE3).
#pragma once

#include <immintrin.h>

#include "scan_scalar.h"

#define WW_SSSE3 __attribute__((target("ssse3")))

namespace ww {

template <class K>
constexpr bool has_vector_scan = K::key_mask != 0 && K::key_mask <= 0xFF && sizeof(typename K::Bits) <= 4;

// The keys of 16 elements as bytes.
template <class K>
WW_SSSE3 inline __m128i keys16(const typename K::Bits* p) {
    const __m128i* v = reinterpret_cast<const __m128i*>(p);
    if constexpr (sizeof(typename K::Bits) == 1) {
        return _mm_and_si128(_mm_srli_epi16(_mm_loadu_si128(v), K::key_shift), _mm_set1_epi8(char(K::key_mask)));
    } else if constexpr (sizeof(typename K::Bits) == 2) {
        const __m128i mask = _mm_set1_epi16(K::key_mask);
        const __m128i a = _mm_and_si128(_mm_srli_epi16(_mm_loadu_si128(v), K::key_shift), mask);
        const __m128i b = _mm_and_si128(_mm_srli_epi16(_mm_loadu_si128(v + 1), K::key_shift), mask);
        return _mm_packus_epi16(a, b);
    } else {
        const __m128i mask = _mm_set1_epi32(K::key_mask);
        __m128i quarter[4];
        for (int q = 0; q < 4; q++)
            quarter[q] = _mm_and_si128(_mm_srli_epi32(_mm_loadu_si128(v + q), K::key_shift), mask);
        return _mm_packus_epi16(_mm_packs_epi32(quarter[0], quarter[1]), _mm_packs_epi32(quarter[2], quarter[3]));
    }
}

// Bytes of ones where two times 16 elements are equal.
template <class T>
WW_SSSE3 inline __m128i equal16(const T* a, const T* b) {
    __m128i equal[sizeof(T)];
    for (size_t q = 0; q < sizeof(T); q++) {
        const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a) + q);
        const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b) + q);
        equal[q] = sizeof(T) == 1 ? _mm_cmpeq_epi8(x, y) : sizeof(T) == 2 ? _mm_cmpeq_epi16(x, y) : _mm_cmpeq_epi32(x, y);
    }
    if constexpr (sizeof(T) == 1) return equal[0];
    else if constexpr (sizeof(T) == 2) return _mm_packs_epi16(equal[0], equal[1]);
    else return _mm_packs_epi16(_mm_packs_epi32(equal[0], equal[1]), _mm_packs_epi32(equal[2], equal[3]));
}

struct ScanTables {
    __m128i base, last, weight_less_one, expected;

    WW_SSSE3 explicit ScanTables(const Weights& w)
        : base(_mm_set1_epi8(char(std::min(w.base_key, 255u)))), last(_mm_set1_epi8(n_classes - 1)),
          weight_less_one(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w.weight_less_one))),
          expected(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w.expected))) {}

    template <class K>
    WW_SSSE3 __m128i classes16(const typename K::Bits* p) const {
        return _mm_min_epu8(_mm_subs_epu8(keys16<K>(p), base), last);
    }
};

// Every lane: the sum of the lanes up to and with it.
WW_SSSE3 inline __m128i sums_through(__m128i v) {
    v = _mm_add_epi16(v, _mm_slli_si128(v, 2));
    v = _mm_add_epi16(v, _mm_slli_si128(v, 4));
    return _mm_add_epi16(v, _mm_slli_si128(v, 8));
}

// Fills in where the block's groups end; gives its marks.
template <class K, bool Changes>
WW_SSSE3 inline uint64_t scan_block(const typename K::Bits* old, const typename K::Bits* now, const ScanTables& tables,
                                    uint16_t* ends) {
    const __m128i one_each = _mm_set_epi16(64, 56, 48, 40, 32, 24, 16, 8);
    __m128i sums[4];
    uint64_t marked = 0;
    for (int g = 0; g < 4; g++) {
        const __m128i classes = tables.classes16<K>(old + 16 * g);
        sums[g] = _mm_sad_epu8(_mm_shuffle_epi8(tables.weight_less_one, classes), _mm_setzero_si128());
        uint32_t marks = uint32_t(_mm_movemask_epi8(_mm_shuffle_epi8(tables.expected, classes)));
        if constexpr (Changes) marks |= 0xFFFF & ~uint32_t(_mm_movemask_epi8(equal16(old + 16 * g, now + 16 * g)));
        marked |= uint64_t(marks) << (16 * g);
    }
    const __m128i groups = _mm_packs_epi32(_mm_packs_epi32(sums[0], sums[1]), _mm_packs_epi32(sums[2], sums[3]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(ends), _mm_add_epi16(sums_through(groups), one_each));
    return marked;
}

template <class K, bool Changes>
WW_SSSE3 void scan_blocks_ssse3(const typename K::Bits* old, const typename K::Bits* now, size_t n_blocks,
                                const Weights& weights, Window& window) {
    const ScanTables tables(weights);
    uint32_t running = window.border[0];
    for (size_t b = 0; b < n_blocks; b++) {
        uint16_t* ends = window.ends_of_block(b);
        window.marked[b] = scan_block<K, Changes>(old + b * block_size, now + b * block_size, tables, ends);
        running += ends[groups_per_block - 1];
        window.border[b + 1] = running;
    }
}

// Scans so many whole blocks, and says how many it did: none on a processor without byte look-ups.
template <class K, bool Changes>
size_t scan_blocks(const typename K::Bits* old, const typename K::Bits* now, size_t n_blocks, const Weights& weights,
                   Window& window) {
    if (!__builtin_cpu_supports("ssse3")) return 0;
    scan_blocks_ssse3<K, Changes>(old, now, n_blocks, weights, window);
    return n_blocks;
}

}  // namespace ww

#undef WW_SSSE3
