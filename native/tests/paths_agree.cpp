// Do the vector paths of this machine say what the plain loops say? And does decode undo encode?
// Build: g++ -O2 -std=c++17 native/tests/paths_agree.cpp -o paths_agree && ./paths_agree [seed]
#include <cstdio>
#include <cstdlib>
#include <random>

#include "../compact_decode.h"
#include "../compact_encode.h"

using namespace ww;

static std::mt19937_64 random_bits;

static void check(bool agree, const char* what) {
    if (agree) return;
    std::printf("paths differ: %s\n", what);
    std::exit(1);
}

// Any model a stream may carry, with one to ten step tokens per class.
template <class K>
Model random_model() {
    Model model;
    model.base_key = uint32_t(random_bits() % (K::key_mask + 300));
    for (int c = 0; c < n_classes; c++) {
        const bool last = c == n_classes - 1;
        model.log2_weight[c] = last ? 0 : uint8_t(random_bits() % (max_log2_weight + 1));
        model.expected[c] = !last && random_bits() % 4 == 0;
        model.max_weight_log2 = std::max(model.max_weight_log2, int(model.log2_weight[c]));
        const uint32_t max_token = token_of((uint64_t(1) << (K::n_bits - 1)) - 1);
        const int n = 1 + int(random_bits() % 10);
        uint8_t tokens[10];
        uint16_t frequencies[10];
        for (int t = 0; t < n; t++) {
            tokens[t] = uint8_t(t);
            frequencies[t] = uint16_t(t ? 1 : probability_sum - uint32_t(n) + 1);
        }
        check(model.steps[c].load(n, tokens, frequencies, max_token), "a model");
    }
    return model;
}

// Half of the time all keys are near each other, as in a trained tensor.
template <class T>
std::vector<T> random_elements(size_t n) {
    const T middle = T(random_bits());
    const int spread = random_bits() % 2 ? 0 : int(4 * sizeof(T));
    std::vector<T> bits(n);
    for (T& b : bits) b = T(middle ^ (T(random_bits()) >> spread));
    return bits;
}

template <class T>
std::vector<T> some_changed(const std::vector<T>& old) {
    const uint64_t one_in = uint64_t(1) << (random_bits() % 10);
    std::vector<T> now = old;
    for (T& b : now)
        if (random_bits() % one_in == 0) b = T(b + 1 + random_bits() % 5);
    return now;
}

template <class K, bool Changes>
void check_scan(const std::vector<typename K::Bits>& old, const std::vector<typename K::Bits>& now,
                const Weights& weights) {
    const size_t n = std::min(window_size, old.size()), n_blocks = (n + block_size - 1) / block_size;
    Window fast, plain;
    plain.border[0] = 7;
    scan_window<K, Changes>(old.data(), now.data(), n, weights, 7, fast);
    for (size_t b = 0; b < n_blocks; b++)
        scan_block_any<K, Changes>(old.data() + b * block_size, now.data() + b * block_size,
                                   std::min(block_size, n - b * block_size), weights, plain, b);
    check(std::equal(plain.border, plain.border + n_blocks + 1, fast.border), "borders");
    check(std::equal(plain.marked, plain.marked + n_blocks, fast.marked), "marks");
    check(std::equal(plain.group_ends[0], plain.group_ends[n_blocks], fast.group_ends[0]), "ends of groups");
}

template <class K>
void check_places(const std::vector<typename K::Bits>& old, const Weights& weights) {
    const Places<K> places(weights);
    for (size_t at = 0; at + group_size <= old.size(); at += group_size) {
        const size_t place = random_bits() % group_size;
        const uint32_t before = weight_before_any<K>(&old[at], place, weights);
        check(places.before(&old[at], place, true) == before, "weight before a place");
        const Hit plain = find_in_group_any<K>(&old[at], before, weights);
        const Hit fast = places.find(&old[at], before, true);
        check(plain.place == fast.place && plain.offset == fast.offset && plain.log2_weight == fast.log2_weight,
              "place of a slot");
    }
}

template <class K>
void check_round_trip(const std::vector<typename K::Bits>& old, const std::vector<typename K::Bits>& now,
                      const Model& model) {
    using T = typename K::Bits;
    const size_t chunk = (old.size() + gang_size - 1) / gang_size;
    ChunkCode codes[gang_size];
    ChunkView views[gang_size] = {};
    std::vector<uint32_t> kept_positions[gang_size];
    std::vector<T> kept_bits[gang_size];
    CompactEncoder<K>(model).encode(old.data(), now.data(), old.size(), chunk, codes, 0, kept_positions, kept_bits);
    for (size_t g = 0; g < gang_size; g++) views[g] = {codes[g].head, codes[g].words.data(), codes[g].words.size()};
    std::vector<uint32_t> positions[gang_size];
    std::vector<T> bits[gang_size], decoded = old;
    CompactDecoder<K>(model).decode(old.data(), old.size(), chunk, views, 0, positions, bits);
    for (size_t g = 0; g < gang_size; g++)
        check(kept_positions[g] == positions[g] && kept_bits[g] == bits[g], "kept changes");
    for (size_t g = 0; g < gang_size; g++)
        for (size_t i = 0; i < positions[g].size(); i++) decoded.at(positions[g][i]) = bits[g][i];
    check(decoded == now, "decoded elements");
}

template <class K>
void check_kind() {
    const Model model = random_model<K>();
    const Weights weights(model, K::key_mask);
    const auto old = random_elements<typename K::Bits>(1 + random_bits() % 6000);
    const auto now = some_changed(old);
    check_scan<K, false>(old, old, weights);
    check_scan<K, true>(old, now, weights);
    check_places<K>(old, weights);
    check_round_trip<K>(old, now, model);
    if (old.size() >= block_size)
        check(changed_block(old.data(), now.data()) == changed_block_any(old.data(), now.data(), block_size), "changes");
}

int main(int argc, char** argv) {
    random_bits.seed(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1);
    for (int round = 0; round < 50; round++) {
        check_kind<Kind<uint8_t, 0, 0, false>>();
        check_kind<Kind<uint64_t, 0, 0, false>>();
        check_kind<Kind<uint8_t, 3, 0x0F, true>>();
        check_kind<Kind<uint8_t, 2, 0x1F, true>>();
        check_kind<Kind<uint16_t, 10, 0x1F, true>>();
        check_kind<Kind<uint16_t, 7, 0xFF, true>>();
        check_kind<Kind<uint32_t, 23, 0xFF, true>>();
        check_kind<Kind<uint64_t, 52, 0x7FF, true>>();
    }
    std::puts("paths agree");
}
