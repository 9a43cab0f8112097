// Stand-in for machines without NEON.
#pragma once
#include "scan_any.h"
#if !defined(WW_NEON)
namespace ww {
template <class K>
constexpr bool has_vector_scan = false;
template <class K>
constexpr bool has_vector_find = false;
template <class K, bool Changes>
size_t scan_blocks(const typename K::Bits*, const typename K::Bits*, size_t, const Weights&, Window&) { return 0; }
struct VectorWeights { explicit VectorWeights(const Weights&) {} };
inline uint32_t blocks_passed(const uint32_t* ends, uint32_t slot) {
    uint32_t passed = 0;
    for (size_t b = 0; b < blocks_at_once; b++) passed += ends[b] <= slot;
    return passed;
}
inline uint32_t groups_passed(const uint16_t* ends, uint32_t slot) {
    uint32_t passed = 0;
    for (size_t g = 0; g < groups_per_block; g++) passed += ends[g] <= slot;
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
}
#endif
