// The digest: two lanes of a sum over limbs of at most 32 bits, each mixed with its index.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ww {

struct Digest {
    uint64_t lane[2] = {0, 0};
    void add(const Digest& other) {
        lane[0] += other.lane[0];
        lane[1] += other.lane[1];
    }
};

inline uint32_t mix32(uint32_t v) {
    v = (v ^ (v >> 16)) * 0x7FEB352Du;
    v = (v ^ (v >> 15)) * 0x846CA68Bu;
    return v ^ (v >> 16);
}

struct PlaceKeys {
    alignas(64) uint32_t row[3][256];
    PlaceKeys() {
        for (uint32_t i = 0; i < 3 * 256; i++) row[i / 256][i % 256] = mix32((i + 1) * 0x9E3779B9u);
    }
};

inline const PlaceKeys& place_keys() {
    static const PlaceKeys keys;
    return keys;
}

// The odd number by which a block's sum counts in a lane.
inline uint64_t block_multiplier(uint32_t lane, uint64_t block) {
    const auto word = [block](uint32_t row) {
        return mix32(uint32_t(block) * 0x85EBCA6Bu + (row * 0xC2B2AE35u + 0x27D4EB2Fu));
    };
    return uint64_t(word(2 * lane)) << 32 | word(2 * lane + 1) | 1;
}

inline void add_block(Digest& sum, uint64_t block, uint64_t lane0, uint64_t lane1) {
    sum.lane[0] += lane0 * block_multiplier(0, block);
    sum.lane[1] += lane1 * block_multiplier(1, block);
}

// Limbs that lie in one block of 256, the first at the given place; a loop that compilers vectorise.
template <class L>
inline void digest_in_block(Digest& sum, const L* limbs, size_t n, uint64_t first_limb, const PlaceKeys& keys) {
    const size_t place = first_limb & 255;
    const uint32_t *k0 = keys.row[0] + place, *k1 = keys.row[1] + place, *k2 = keys.row[2] + place;
    uint64_t lane0 = 0, lane1 = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t m = limbs[i];
        const uint64_t keyed = uint32_t(m + k0[i]);
        lane0 += keyed * uint32_t(m + k1[i]);
        lane1 += keyed * uint32_t(m + k2[i]);
    }
    add_block(sum, first_limb >> 8, lane0, lane1);
}

template <class L>
Digest digest_limbs(const L* limbs, size_t n, uint64_t first_limb) {
    const PlaceKeys& keys = place_keys();
    Digest sum;
    while (n) {
        const size_t room = 256 - (first_limb & 255);
        const size_t count = n < room ? n : room;
        digest_in_block(sum, limbs, count, first_limb, keys);
        limbs += count;
        first_limb += count;
        n -= count;
    }
    return sum;
}

template <class T>
Digest digest_elements(const T* bits, size_t n, uint64_t first) {
    if constexpr (sizeof(T) == 8) {  // little-endian: low half first
        return digest_limbs(reinterpret_cast<const uint32_t*>(bits), 2 * n, 2 * first);
    } else {
        return digest_limbs(bits, n, first);
    }
}

inline void add_limb(Digest& sum, uint32_t limb, uint64_t index, const PlaceKeys& keys) {
    const size_t place = index & 255;
    const uint64_t keyed = uint32_t(limb + keys.row[0][place]);
    add_block(sum, index >> 8, keyed * uint32_t(limb + keys.row[1][place]), keyed * uint32_t(limb + keys.row[2][place]));
}

template <class T, class P>
Digest digest_at(const P* positions, const T* bits, size_t n, uint64_t first) {
    const PlaceKeys& keys = place_keys();
    Digest sum;
    for (size_t i = 0; i < n; i++) {
        const uint64_t index = first + positions[i];
        if constexpr (sizeof(T) == 8) {
            add_limb(sum, uint32_t(bits[i]), 2 * index, keys);
            add_limb(sum, uint32_t(bits[i] >> 32), 2 * index + 1, keys);
        } else {
            add_limb(sum, bits[i], index, keys);
        }
    }
    return sum;
}

}  // namespace ww
