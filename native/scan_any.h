// What a scan needs and leaves behind, and the scan of any element type on any machine.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "elements.h"
#include "tables.h"

namespace ww {

constexpr size_t group_size = 8;
constexpr size_t block_size = 64;
constexpr size_t groups_per_block = block_size / group_size;

// Blocks are searched so many at a time.
constexpr size_t blocks_at_once = 8;

// Scans run over windows that stay in the first-level cache until their events are dealt with.
constexpr size_t window_size = 4096;

// What a key says about its element.
struct KeyInfo {
    uint8_t number;  // of its class
    uint8_t log2_weight;
    uint8_t expected;
    uint8_t one_step;
};

// Per class and per key: weight and expectation, as tables for vector and for scalar look-ups.
struct Weights {
    uint32_t base_key;
    uint8_t log2_weight[n_classes];
    uint8_t weight_less_one[n_classes];
    uint8_t expected[n_classes];
    bool any_expected = false;
    std::vector<KeyInfo> of_key;

    Weights(const Model& model, uint32_t key_mask) : base_key(model.base_key), of_key(key_mask + 1) {
        for (int c = 0; c < n_classes; c++) {
            log2_weight[c] = model.log2_weight[c];
            weight_less_one[c] = uint8_t((1u << model.log2_weight[c]) - 1);
            expected[c] = model.expected[c] ? 0xFF : 0;
            any_expected |= model.expected[c];
        }
        for (uint32_t key = 0; key <= key_mask; key++) {
            const uint32_t above = key > base_key ? key - base_key : 0;
            const uint32_t c = std::min<uint32_t>(above, n_classes - 1);
            of_key[key] = {uint8_t(c), log2_weight[c], model.expected[c], model.steps[c].one_step};
        }
    }
};

// What a scan of a window leaves behind.
struct Window {
    uint32_t border[1 + window_size / block_size + blocks_at_once];  // running weight before each block, and after
    // Per block, counted from its border: where each group of 8 ends, after eight places of which the last
    // stays 0. So the end before a group's own is where it starts.
    uint16_t group_ends[window_size / block_size][2 * groups_per_block] = {};
    uint64_t marked[window_size / block_size];  // one bit per element: expected to change, or seen to

    uint16_t* ends_of_block(size_t b) { return group_ends[b] + groups_per_block; }
    const uint16_t* ends_of_block(size_t b) const { return group_ends[b] + groups_per_block; }

    uint32_t start_of_group(size_t group) const {
        const size_t b = group / groups_per_block;
        return border[b] + group_ends[b][groups_per_block + group % groups_per_block - 1];
    }

    // A few more borders that no slot passes, so that a search needs no bound.
    void close(size_t n_blocks) {
        for (size_t b = 1; b <= blocks_at_once; b++) border[n_blocks + b] = UINT32_MAX;
    }
};

// Where a slot falls: the element's place in its group, the slot's offset in the element's interval.
struct Hit {
    uint32_t place, offset, log2_weight;
};

template <class K, bool Changes>
inline void scan_block_any(const typename K::Bits* old, const typename K::Bits* now, size_t n, const Weights& weights,
                           Window& window, size_t b) {
    uint64_t marked = 0;
    uint32_t sum = 0;
    for (size_t g = 0; g < groups_per_block; g++) {
        for (size_t i = g * group_size; i < (g + 1) * group_size && i < n; i++) {
            const KeyInfo& info = weights.of_key[K::key(old[i])];
            sum += 1u << info.log2_weight;
            const bool changed = Changes && old[i] != now[i];
            marked |= uint64_t(info.expected | changed) << i;
        }
        window.ends_of_block(b)[g] = uint16_t(sum);
    }
    window.marked[b] = marked;
    window.border[b + 1] = window.border[b] + sum;
}

template <class T>
inline uint64_t changed_block_any(const T* a, const T* b, size_t n) {
    uint64_t mask = 0;
    for (size_t i = 0; i < n; i++) mask |= uint64_t(a[i] != b[i]) << i;
    return mask;
}

// The sum of the weights of the elements before a place in their group.
template <class K>
inline uint32_t weight_before_any(const typename K::Bits* group, size_t place, const Weights& weights) {
    uint32_t sum = 0;
    for (size_t i = 0; i < place; i++) sum += 1u << weights.of_key[K::key(group[i])].log2_weight;
    return sum;
}

// The element of a group whose interval holds the slot (counted from the group's start).
template <class K>
inline Hit find_in_group_any(const typename K::Bits* group, uint32_t slot, const Weights& weights) {
    uint32_t place = 0, log2_weight = weights.of_key[K::key(group[0])].log2_weight;
    while (slot >= 1u << log2_weight) {
        slot -= 1u << log2_weight;
        log2_weight = weights.of_key[K::key(group[++place])].log2_weight;
    }
    return {place, slot, log2_weight};
}

}  // namespace ww
