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
    alignas(64) uint32_t row[4][256];
    PlaceKeys() {
        for (uint32_t i = 0; i < 4 * 256; i++) row[i / 256][i % 256] = mix32((i + 1) * 0x9E3779B9u);
    }
};

inline const PlaceKeys& place_keys() {
    static const PlaceKeys keys;
    return keys;
}

struct BlockKeys {
    uint32_t row[4];
    explicit BlockKeys(uint64_t block) {
        for (uint32_t r = 0; r < 4; r++)
            row[r] = mix32(uint32_t(block) * 0x85EBCA6Bu + (r * 0xC2B2AE35u + 0x27D4EB2Fu));
    }
};

inline void add_limb(Digest& sum, uint32_t limb, uint32_t place, const BlockKeys& block, const PlaceKeys& keys) {
    const auto keyed = [&](int r) { return uint64_t(uint32_t(limb + (keys.row[r][place] ^ block.row[r]))); };
    sum.lane[0] += keyed(0) * keyed(1);
    sum.lane[1] += keyed(2) * keyed(3);
}

// Limbs first_limb .. first_limb + n, all in one block of 256; a plain loop that compilers vectorise.
template <class L>
inline void digest_in_block(Digest& sum, const L* limbs, size_t n, uint64_t first_limb, const PlaceKeys& keys) {
    const BlockKeys block(first_limb >> 8);
    const size_t place = first_limb & 255;
    const uint32_t *k0 = keys.row[0] + place, *k1 = keys.row[1] + place;
    const uint32_t *k2 = keys.row[2] + place, *k3 = keys.row[3] + place;
    const uint32_t h0 = block.row[0], h1 = block.row[1], h2 = block.row[2], h3 = block.row[3];
    uint64_t lane0 = 0, lane1 = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t m = limbs[i];
        lane0 += uint64_t(uint32_t(m + (k0[i] ^ h0))) * uint32_t(m + (k1[i] ^ h1));
        lane1 += uint64_t(uint32_t(m + (k2[i] ^ h2))) * uint32_t(m + (k3[i] ^ h3));
    }
    sum.lane[0] += lane0;
    sum.lane[1] += lane1;
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

template <class T, class P>
Digest digest_at(const P* positions, const T* bits, size_t n, uint64_t first) {
    const PlaceKeys& keys = place_keys();
    Digest sum;
    for (size_t i = 0; i < n; i++) {
        const uint64_t index = first + positions[i];
        if constexpr (sizeof(T) == 8) {
            const BlockKeys block((2 * index) >> 8);
            add_limb(sum, uint32_t(bits[i]), uint32_t(2 * index) & 255, block, keys);
            add_limb(sum, uint32_t(bits[i] >> 32), uint32_t(2 * index + 1) & 255, block, keys);
        } else {
            add_limb(sum, bits[i], uint32_t(index) & 255, BlockKeys(index >> 8), keys);
        }
    }
    return sum;
}

}  // namespace ww
