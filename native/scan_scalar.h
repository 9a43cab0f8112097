// What a machine without our vectors for finding does instead; compilers vectorise these loops well.
#pragma once

#include "scan_any.h"

namespace ww {

// Finding intervals in a group, whole or not.
template <class K>
class Places {
  public:
    using T = typename K::Bits;

    explicit Places(const Weights& weights) : weights_(weights) {}

    uint32_t before(const T* group, size_t place, bool) const { return weight_before_any<K>(group, place, weights_); }
    Hit find(const T* group, uint32_t slot, bool) const { return find_in_group_any<K>(group, slot, weights_); }

  private:
    const Weights& weights_;
};

// How many of the next eight blocks end at or before the slot.
inline uint32_t blocks_passed(const uint32_t* ends, uint32_t slot) {
    uint32_t passed = 0;
    for (size_t b = 0; b < blocks_at_once; b++) passed += ends[b] <= slot;
    return passed;
}

// How many of a block's groups end at or before the slot (counted from the block's border).
inline uint32_t groups_passed(const uint16_t* ends, uint32_t slot) {
    uint32_t passed = 0;
    for (size_t g = 0; g < groups_per_block; g++) passed += ends[g] <= slot;
    return passed;
}

// Eight bytes that are 0 or 1 become eight bits by one multiply.
template <class T>
inline uint64_t changed_block(const T* a, const T* b) {
    uint8_t differ[block_size];
    for (size_t i = 0; i < block_size; i++) differ[i] = a[i] != b[i];
    uint64_t mask = 0;
    for (size_t g = 0; g < groups_per_block; g++) {
        uint64_t bytes;
        std::memcpy(&bytes, differ + 8 * g, 8);
        mask |= ((bytes * 0x0102040810204080ull) >> 56) << (8 * g);
    }
    return mask;
}

#if !defined(__x86_64__)

template <class K>
constexpr bool has_vector_scan = false;

template <class K, bool Changes>
size_t scan_blocks(const typename K::Bits*, const typename K::Bits*, size_t, const Weights&, Window&) {
    return 0;
}

#endif

}  // namespace ww
