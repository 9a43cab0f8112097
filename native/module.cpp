// Python bindings: arrays in, arrays out, the GIL released around every loop.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>

#include "compact_decode.h"
#include "compact_encode.h"
#include "digest.h"
#include "directory.h"
#include "dlpack.h"
#include "model_bytes.h"
#include "models.h"
#include "parallel.h"
#include "plain.h"
#include "survey.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ww {

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using InOut = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <class T>
Out<T> to_numpy(std::unique_ptr<T[]> data, size_t n) {
    T* p = data.release();
    nb::capsule owner(p, [](void* q) noexcept { delete[] static_cast<T*>(q); });
    return Out<T>(p, {n}, owner);
}

// A model as it comes from Python: flat arrays, checked here once.
inline void check_model(bool sound) {
    if (!sound) throw CorruptStream("a class model is out of range");
}

Model load_model(uint32_t base_key, const In<uint8_t>& log2_weights, const In<uint8_t>& expected,
                 const In<uint8_t>& table_sizes, const In<uint8_t>& tokens, const In<uint16_t>& frequencies,
                 uint32_t max_token) {
    Model model;
    model.base_key = base_key;
    check_model(log2_weights.size() == n_classes && expected.size() == n_classes &&
                table_sizes.size() == n_classes && tokens.size() == frequencies.size());
    size_t at = 0;
    for (int c = 0; c < n_classes; c++) {
        model.log2_weight[c] = log2_weights.data()[c];
        check_model(model.log2_weight[c] <= max_log2_weight);
        model.expected[c] = expected.data()[c] != 0;
        model.max_weight_log2 = std::max(model.max_weight_log2, int(model.log2_weight[c]));
        const size_t size = table_sizes.data()[c];
        check_model(size > 0 && size <= n_tokens && at + size <= tokens.size());
        check_model(model.steps[c].load(int(size), tokens.data() + at, frequencies.data() + at, max_token));
        at += size;
    }
    check_model(at == tokens.size());
    check_model(model.log2_weight[n_classes - 1] == 0 && !model.expected[n_classes - 1]);
    return model;
}

template <class K>
uint32_t max_token() {
    return token_of((uint64_t(1) << (K::n_bits - 1)) - 1);
}

void check_threads(size_t n_threads) {
    if (n_threads < 1) throw std::invalid_argument("n_threads must be at least 1");
}

size_t chunk_count(size_t n, int chunk_log2) {
    if (chunk_log2 < 4 || chunk_log2 > 20) throw CorruptStream("chunk size is out of range");
    return (n + (size_t(1) << chunk_log2) - 1) >> chunk_log2;
}

// As many chunks in turns as leave work for every thread.
size_t gang_for(size_t n_chunks, size_t n_threads) {
    return std::min(gang_size, std::max<size_t>(1, n_chunks / n_threads));
}

size_t gang_count(size_t n_chunks, size_t gang) { return (n_chunks + gang - 1) / gang; }

template <class T>
void check_same_size(const In<T>& a, const In<T>& b) {
    if (a.size() != b.size()) throw std::invalid_argument("old and new have different lengths");
}

void check_piece_size(size_t n) {
    if (n > (uint64_t(1) << 32)) throw std::invalid_argument("a piece has at most 2^32 elements");
}

// ------------------------------------------------------------------------------------- chunks put together

// An array on its way to Python: filled without the GIL, handed over with it.
template <class T>
struct Array {
    std::unique_ptr<T[]> data;
    size_t n = 0;

    Array() = default;
    explicit Array(size_t size) : data(new T[size]), n(size) {}

    Out<T> to_numpy() { return ww::to_numpy(std::move(data), n); }
};

template <class T>
Array<T> join(const std::vector<std::vector<T>>& parts) {
    size_t n = 0, at = 0;
    for (const auto& part : parts) n += part.size();
    Array<T> all(n);
    for (const auto& part : parts) {
        std::copy(part.begin(), part.end(), all.data.get() + at);
        at += part.size();
    }
    return all;
}

// Changes by chunk.
template <class T>
struct Pieces {
    std::vector<std::vector<uint32_t>> positions;
    std::vector<std::vector<T>> bits;

    explicit Pieces(size_t n) : positions(n), bits(n) {}

    // Takes the changes of chunk `c`, which starts at `first`, from the places where they are in it.
    void set(size_t c, const T* now, uint32_t first, const uint32_t* places, size_t n) {
        positions[c].resize(n);
        bits[c].resize(n);
        for (size_t i = 0; i < n; i++) {
            positions[c][i] = first + places[i];
            bits[c][i] = now[first + places[i]];
        }
    }
};

// Directory, payload, number of changes; positions and new bits too, or two empty arrays.
template <class Payload, class T>
using Coded = std::tuple<Out<uint32_t>, Out<Payload>, size_t, Out<uint32_t>, Out<T>>;

// ------------------------------------------------------------------------------------------------- survey

template <class K>
std::pair<Out<int64_t>, Out<int64_t>> survey(In<typename K::Bits> old, In<typename K::Bits> now,
                                             In<uint64_t> starts, In<uint64_t> stops) {
    check_same_size(old, now);
    const size_t n_keys = K::key_mask + 1;
    auto by_key = std::make_unique<int64_t[]>(n_keys);
    auto by_token = std::make_unique<int64_t[]>(n_keys * n_tokens);
    {
        nb::gil_scoped_release release;
        Survey<K> sample(by_key.get(), by_token.get());
        for (size_t r = 0; r < starts.size(); r++) {
            const size_t start = starts.data()[r], stop = std::min<size_t>(stops.data()[r], old.size());
            if (start < stop) sample.add_run(old.data() + start, now.data() + start, stop - start);
        }
    }
    return {to_numpy(std::move(by_key), n_keys), to_numpy(std::move(by_token), n_keys * n_tokens)};
}

// ------------------------------------------------------------------------------------------------ compact

template <class K>
Coded<uint32_t, typename K::Bits> encode_compact(
    In<typename K::Bits> old, In<typename K::Bits> now, uint32_t base_key, In<uint8_t> log2_weights,
    In<uint8_t> expected, In<uint8_t> table_sizes, In<uint8_t> tokens, In<uint16_t> frequencies,
    int chunk_log2, size_t n_threads, bool keep_changes) {
    using T = typename K::Bits;
    check_same_size(old, now);
    check_threads(n_threads);
    const Model model =
        load_model(base_key, log2_weights, expected, table_sizes, tokens, frequencies, max_token<K>());
    const size_t n = old.size(), size = size_t(1) << chunk_log2, n_chunks = chunk_count(n, chunk_log2);
    check_piece_size(n);
    Array<uint32_t> directory(2 * n_chunks), payload, positions;
    Array<T> bits;
    std::atomic<size_t> n_changed{0};
    {
        nb::gil_scoped_release release;
        std::vector<std::vector<uint32_t>> words(n_chunks);
        Pieces<T> kept(keep_changes ? n_chunks : 0);
        const size_t n_gang = gang_for(n_chunks, n_threads);
        run_jobs(gang_count(n_chunks, n_gang), n_threads, [&] {
            auto encoder = std::make_shared<CompactEncoder<K>>(model);
            return [&, encoder](size_t gang) {
                const size_t first = gang * n_gang * size, count = std::min(n_gang * size, n - first);
                ChunkCode codes[gang_size];
                n_changed += encoder->encode(old.data() + first, now.data() + first, count, size, codes, uint32_t(first),
                                             keep_changes ? &kept.positions[gang * n_gang] : nullptr,
                                             keep_changes ? &kept.bits[gang * n_gang] : nullptr);
                for (size_t c = gang * n_gang, g = 0; g < n_gang && c < n_chunks; c++, g++) {
                    directory.data[2 * c] = codes[g].head;
                    directory.data[2 * c + 1] = uint32_t(codes[g].words.size());
                    words[c].swap(codes[g].words);
                }
            };
        });
        payload = join(words);
        positions = join(kept.positions);
        bits = join(kept.bits);
    }
    return {directory.to_numpy(), payload.to_numpy(), n_changed.load(), positions.to_numpy(), bits.to_numpy()};
}

template <class K>
std::pair<Out<uint32_t>, Out<typename K::Bits>> decode_compact(
    In<typename K::Bits> old, uint32_t base_key, In<uint8_t> log2_weights, In<uint8_t> expected,
    In<uint8_t> table_sizes, In<uint8_t> tokens, In<uint16_t> frequencies, int chunk_log2,
    In<uint32_t> directory, In<uint8_t> payload, size_t n_threads) {
    using T = typename K::Bits;
    check_threads(n_threads);
    const Model model =
        load_model(base_key, log2_weights, expected, table_sizes, tokens, frequencies, max_token<K>());
    const size_t n = old.size(), size = size_t(1) << chunk_log2, n_chunks = chunk_count(n, chunk_log2);
    check_piece_size(n);
    if (directory.size() != 2 * n_chunks) throw CorruptStream("directory does not match the piece");
    Array<uint32_t> positions;
    Array<T> bits;
    {
        nb::gil_scoped_release release;
        Pieces<T> pieces(n_chunks);
        std::vector<size_t> starts(n_chunks + 1, 0);
        for (size_t c = 0; c < n_chunks; c++) starts[c + 1] = starts[c] + directory.data()[2 * c + 1];
        if (starts[n_chunks] * 4 != payload.size()) throw CorruptStream("payload does not match its directory");
        if (reinterpret_cast<uintptr_t>(payload.data()) % 4) throw std::invalid_argument("payload is not aligned");
        const uint32_t* words = reinterpret_cast<const uint32_t*>(payload.data());
        const size_t n_gang = gang_for(n_chunks, n_threads);
        run_jobs(gang_count(n_chunks, n_gang), n_threads, [&] {
            auto decoder = std::make_shared<CompactDecoder<K>>(model);
            return [&, decoder](size_t gang) {
                const size_t first = gang * n_gang * size, count = std::min(n_gang * size, n - first);
                ChunkView views[gang_size];
                for (size_t c = gang * n_gang, g = 0; g < n_gang && c < n_chunks; c++, g++)
                    views[g] = {directory.data()[2 * c], words + starts[c], directory.data()[2 * c + 1]};
                decoder->decode(old.data() + first, count, size, views, uint32_t(first),
                                &pieces.positions[gang * n_gang], &pieces.bits[gang * n_gang]);
            };
        });
        positions = join(pieces.positions);
        bits = join(pieces.bits);
    }
    return {positions.to_numpy(), bits.to_numpy()};
}

// -------------------------------------------------------------------------------------------------- plain

template <class T>
Coded<uint8_t, T> encode_plain(In<T> old, In<T> now, size_t n_threads, bool keep_changes) {
    check_same_size(old, now);
    check_threads(n_threads);
    const size_t n = old.size(), n_chunks = (n + plain_chunk - 1) / plain_chunk;
    check_piece_size(n);
    Array<uint32_t> directory(n_chunks), positions;
    Array<uint8_t> payload;
    Array<T> bits;
    std::atomic<size_t> n_changed{0};
    {
        nb::gil_scoped_release release;
        std::vector<std::vector<uint8_t>> parts(n_chunks);
        Pieces<T> kept(keep_changes ? n_chunks : 0);
        run_jobs(n_chunks, n_threads, [&] {
            auto scratch = std::make_shared<PlainScratch>();
            return [&, scratch](size_t c) {
                const size_t first = c * plain_chunk, count = std::min(plain_chunk, n - first);
                const auto encode = keep_changes ? encode_plain_chunk<true, T> : encode_plain_chunk<false, T>;
                const size_t n_here =
                    encode(old.data() + first, now.data() + first, count, *scratch, directory.data[c], parts[c]);
                if (keep_changes) kept.set(c, now.data(), uint32_t(first), scratch->places.data(), n_here);
                n_changed += n_here;
            };
        });
        payload = join(parts);
        positions = join(kept.positions);
        bits = join(kept.bits);
    }
    return {directory.to_numpy(), payload.to_numpy(), n_changed.load(), positions.to_numpy(), bits.to_numpy()};
}

template <class T>
std::pair<Out<uint32_t>, Out<T>> decode_plain(size_t n, In<uint32_t> directory, In<uint8_t> payload,
                                              size_t n_threads) {
    check_threads(n_threads);
    const size_t n_chunks = (n + plain_chunk - 1) / plain_chunk;
    check_piece_size(n);
    if (directory.size() != n_chunks) throw CorruptStream("directory does not match the piece");
    Array<uint32_t> positions;
    Array<T> bits;
    {
        nb::gil_scoped_release release;
        Pieces<T> pieces(n_chunks);
        std::vector<size_t> starts(n_chunks + 1, 0);
        for (size_t c = 0; c < n_chunks; c++)
            starts[c + 1] = starts[c] + plain_chunk_bytes(directory.data()[c], std::min(plain_chunk, n - c * plain_chunk), sizeof(T));
        if (starts[n_chunks] != payload.size()) throw CorruptStream("payload does not match its directory");
        run_jobs(n_chunks, n_threads, [&] {
            auto places = std::make_shared<std::vector<uint32_t>>();
            return [&, places](size_t c) {
                const size_t first = c * plain_chunk;
                decode_plain_chunk(directory.data()[c], std::min(plain_chunk, n - first), payload.data() + starts[c],
                                   starts[c + 1] - starts[c], uint32_t(first), *places, pieces.positions[c],
                                   pieces.bits[c]);
            };
        });
        positions = join(pieces.positions);
        bits = join(pieces.bits);
    }
    return {positions.to_numpy(), bits.to_numpy()};
}

// ------------------------------------------------------------------------------------- scatter and digest

constexpr size_t places_slice = size_t(1) << 13;  // positions a thread takes at a time
constexpr size_t n_ahead = 16;  // elements between a prefetch and its use: memory answers in about that time

// Refuses before the first access. A plain maximum, so that the compiler can use vectors.
template <class T, class P>
void check_places(size_t limit, In<P> positions, In<T> values) {
    if (positions.size() != values.size()) throw std::invalid_argument("positions and bits have different lengths");
    P last = 0;
    for (size_t i = 0; i < positions.size(); i++) last = std::max(last, positions.data()[i]);
    if (positions.size() && last >= limit) throw std::out_of_range("a position lies past the end of its tensor");
}

// Calls visit(i, place) for the element at each position of a slice, with its memory fetched ahead.
template <bool writes, class T, class P, class Visit>
void visit_slice(T* bits, const P* positions, size_t first, size_t stop, Visit visit) {
    for (size_t i = first; i < stop; i++) {
        if (i + n_ahead < stop) __builtin_prefetch(bits + positions[i + n_ahead], writes);
        visit(i, bits[positions[i]]);
    }
}

// The same for all positions, in slices that threads take in turn.
template <bool writes, class T, class P, class Visit>
void visit_places(T* bits, size_t n_bits, In<P> positions, In<std::remove_const_t<T>> values, size_t n_threads,
                  Visit visit) {
    check_threads(n_threads);
    nb::gil_scoped_release release;
    check_places(n_bits, positions, values);
    const size_t n = positions.size(), slice = places_slice;
    run_jobs((n + slice - 1) / slice, n_threads, [&] {
        return [&](size_t job) {
            visit_slice<writes>(bits, positions.data(), job * slice, std::min(n, (job + 1) * slice), visit);
        };
    });
}

template <class T, class P>
void scatter(InOut<T> bits, In<P> positions, In<T> now, size_t n_threads) {
    visit_places<true>(bits.data(), bits.size(), positions, now, n_threads,
                       [&](size_t i, T& place) { place = now.data()[i]; });
}

// One memory and what goes into it, with the types forgotten: memories of all widths share the threads.
struct Scatter {
    void (*write)(const Scatter&, size_t first, size_t stop);
    void* bits;
    const void* positions;
    const void* now;
    size_t n;
};

template <class T, class P>
Scatter make_scatter(const nb::tuple& item) {
    // Never converted: a copy would be gone before it is read, and writes to one would be lost.
    const auto bits = nb::cast<InOut<T>>(item[0], false);
    const auto positions = nb::cast<In<P>>(item[1], false);
    const auto now = nb::cast<In<T>>(item[2], false);
    check_places(bits.size(), positions, now);
    const auto write = [](const Scatter& s, size_t first, size_t stop) {
        visit_slice<true>(static_cast<T*>(s.bits), static_cast<const P*>(s.positions), first, stop,
                          [&](size_t i, T& place) { place = static_cast<const T*>(s.now)[i]; });
    };
    return {write, bits.data(), positions.data(), now.data(), positions.size()};
}

template <class T>
Scatter make_scatter(const nb::tuple& item) {
    return nb::isinstance<In<uint32_t>>(item[1]) ? make_scatter<T, uint32_t>(item) : make_scatter<T, uint64_t>(item);
}

Scatter make_scatter(const nb::tuple& item) {
    if (nb::isinstance<InOut<uint8_t>>(item[0])) return make_scatter<uint8_t>(item);
    if (nb::isinstance<InOut<uint16_t>>(item[0])) return make_scatter<uint16_t>(item);
    if (nb::isinstance<InOut<uint32_t>>(item[0])) return make_scatter<uint32_t>(item);
    return make_scatter<uint64_t>(item);
}

// As scatter, for many memories at once: threads are started once, and small memories share them.
// Refuses before the first write. The caller keeps the arrays alive.
void scatter_all(const nb::list& items, size_t n_threads) {
    check_threads(n_threads);
    std::vector<Scatter> scatters;
    for (const auto item : items) scatters.push_back(make_scatter(nb::cast<nb::tuple>(item)));
    nb::gil_scoped_release release;
    std::vector<std::pair<size_t, size_t>> jobs;  // which, and its first element
    constexpr size_t slice = places_slice;
    for (size_t s = 0; s < scatters.size(); s++) {
        for (size_t first = 0; first < scatters[s].n; first += slice) jobs.emplace_back(s, first);
    }
    run_jobs(jobs.size(), n_threads, [&] {
        return [&](size_t job) {
            const Scatter& found = scatters[jobs[job].first];
            found.write(found, jobs[job].second, std::min(found.n, jobs[job].second + slice));
        };
    });
}

// Copies parts into one memory, one after the other, in slices that threads take in turn.
// The caller keeps the parts alive.
void join_parts(const nb::list& items, InOut<uint8_t> out, size_t n_threads) {
    check_threads(n_threads);
    constexpr size_t slice = size_t(1) << 20;
    struct Slice {
        const uint8_t* from;
        size_t to, n;
    };
    std::vector<Slice> slices;
    size_t at = 0;
    for (const auto item : items) {
        // Never converted: a copy would be gone before it is read.
        const auto part = nb::cast<In<uint8_t>>(item, false);
        if (part.size() > out.size() - at) throw std::invalid_argument("parts are larger than their room");
        for (size_t first = 0; first < part.size(); first += slice)
            slices.push_back({part.data() + first, at + first, std::min(slice, part.size() - first)});
        at += part.size();
    }
    if (at != out.size()) throw std::invalid_argument("parts do not fill their room");
    nb::gil_scoped_release release;
    run_jobs(slices.size(), n_threads, [&] {
        return [&](size_t job) { std::memcpy(out.data() + slices[job].to, slices[job].from, slices[job].n); };
    });
}

// Writes like scatter, and gives the bits that were there.
template <class T, class P>
Out<T> exchange(InOut<T> bits, In<P> positions, In<T> now, size_t n_threads) {
    Array<T> before(positions.size());
    visit_places<true>(bits.data(), bits.size(), positions, now, n_threads, [&](size_t i, T& place) {
        before.data[i] = place;
        place = now.data()[i];
    });
    return before.to_numpy();
}

// Whether the elements at these places have these bits.
template <class T, class P>
bool matches(In<T> bits, In<P> positions, In<T> wanted, size_t n_threads) {
    std::atomic<bool> same{true};
    visit_places<false>(bits.data(), bits.size(), positions, wanted, n_threads, [&](size_t i, const T& place) {
        if (place != wanted.data()[i]) same.store(false, std::memory_order_relaxed);
    });
    return same;
}

template <class T>
std::pair<uint64_t, uint64_t> digest(In<T> bits, uint64_t first, size_t n_threads) {
    check_threads(n_threads);
    nb::gil_scoped_release release;
    const size_t n = bits.size(), slice = size_t(1) << 18, n_jobs = (n + slice - 1) / slice;
    std::vector<Digest> parts(n_jobs);
    run_jobs(n_jobs, n_threads, [&] {
        return [&](size_t job) {
            const size_t at = job * slice;
            parts[job] = digest_elements(bits.data() + at, std::min(slice, n - at), first + at);
        };
    });
    Digest sum;
    for (const Digest& part : parts) sum.add(part);
    return {sum.lane[0], sum.lane[1]};
}

template <class T, class P>
std::pair<uint64_t, uint64_t> digest_single(In<P> positions, In<T> bits, uint64_t first) {
    if (positions.size() != bits.size()) throw std::invalid_argument("positions and bits have different lengths");
    nb::gil_scoped_release release;
    const Digest sum = digest_at(positions.data(), bits.data(), bits.size(), first);
    return {sum.lane[0], sum.lane[1]};
}

template <class K>
void bind_kind(nb::module_& m, const char* name) {
    const std::string suffix = std::string("_") + name;
    m.def(("survey" + suffix).c_str(), &survey<K>);
    m.def(("encode_compact" + suffix).c_str(), &encode_compact<K>);
    m.def(("decode_compact" + suffix).c_str(), &decode_compact<K>);
}

template <class T>
void bind_width(nb::module_& m, const char* name) {
    const std::string suffix = std::string("_") + name;
    m.def(("encode_plain" + suffix).c_str(), &encode_plain<T>);
    m.def(("decode_plain" + suffix).c_str(), &decode_plain<T>);
    m.def(("digest" + suffix).c_str(), &digest<T>);
    m.def(("scatter" + suffix).c_str(), &scatter<T, uint32_t>);
    m.def(("scatter" + suffix).c_str(), &scatter<T, uint64_t>);
    m.def(("exchange" + suffix).c_str(), &exchange<T, uint32_t>);
    m.def(("exchange" + suffix).c_str(), &exchange<T, uint64_t>);
    m.def(("matches" + suffix).c_str(), &matches<T, uint32_t>);
    m.def(("matches" + suffix).c_str(), &matches<T, uint64_t>);
    m.def(("digest_at" + suffix).c_str(), &digest_single<T, uint32_t>);
    m.def(("digest_at" + suffix).c_str(), &digest_single<T, uint64_t>);
}

// ------------------------------------------------------------------------------------------------- directories

using DirectoryRows = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Piece, start, elements, head, first word, words, first span, and whether the coder wrote it: per chunk.
using ChunkArrays = std::tuple<Out<int32_t>, Out<int64_t>, Out<int64_t>, Out<uint32_t>, Out<int64_t>, Out<uint32_t>,
                               Out<int64_t>, Out<uint8_t>>;

// The chunks of pieces of so many elements; a directory that does not match its piece is refused.
ChunkArrays read_directories(const nb::list& directories, In<int64_t> sizes, In<int64_t> log2s) {
    const size_t n_pieces = directories.size();
    if (sizes.size() != n_pieces || log2s.size() != n_pieces)
        throw std::invalid_argument("a size and a chunk size for each directory");
    std::vector<DirectoryRows> rows;
    size_t n = 0;
    for (size_t p = 0; p < n_pieces; p++) {
        // Never converted: a copy would be gone before it is read.
        rows.push_back(nb::cast<DirectoryRows>(directories[p], false));
        const int64_t log2 = log2s.data()[p], size = sizes.data()[p];
        if (log2 < 0 || log2 > 40 || size < 0 || size >> 48 || rows[p].shape(1) != 2)
            throw std::invalid_argument("a piece or its chunks are out of range");
        if (int64_t(rows[p].shape(0)) != (size + (int64_t(1) << log2) - 1) >> log2)
            throw CorruptStream("a directory has rows for more or fewer chunks than there are");
        n += rows[p].shape(0);
    }
    Array<int32_t> piece(n);
    Array<int64_t> start(n), n_elements(n), first_word(n), first_span(n);
    Array<uint32_t> head(n), n_words(n);
    Array<uint8_t> is_coded(n);
    const ChunkTables out{piece.data.get(),      start.data.get(),   n_elements.data.get(), head.data.get(),
                          first_word.data.get(), n_words.data.get(), first_span.data.get(), is_coded.data.get()};
    ChunkPlace at;
    for (size_t p = 0; p < n_pieces; p++)
        put_chunks(rows[p].data(), rows[p].shape(0), sizes.data()[p], int(log2s.data()[p]), int32_t(p), out, at);
    return {piece.to_numpy(),      start.to_numpy(),   n_elements.to_numpy(), head.to_numpy(),
            first_word.to_numpy(), n_words.to_numpy(), first_span.to_numpy(), is_coded.to_numpy()};
}

// ------------------------------------------------------------------------------------------------- models

// Log2 weights, expected, table sizes, first tokens, frequencies, chunk sizes, listed elements.
using ModelArrays =
    std::tuple<Out<uint8_t>, Out<uint8_t>, Out<uint8_t>, Out<uint8_t>, Out<uint16_t>, Out<uint8_t>, Out<int64_t>>;

// The models of many pieces, each from 16 counts of elements and 16 * 128 of changes by token.
template <class Count>
ModelArrays build_models(In<Count> by_class, In<int64_t> n_by_class, uint32_t max_token, size_t n_threads) {
    check_threads(n_threads);
    constexpr size_t table = size_t(n_classes) * n_tokens, slice = 16;
    const size_t n = n_by_class.size() / n_classes;
    if (n_by_class.size() != n * n_classes || by_class.size() != n * table || max_token >= n_tokens)
        throw std::invalid_argument("counts by class have the wrong shape");
    Array<uint8_t> weights(n * n_classes), expected(n * n_classes), sizes(n * n_classes), firsts(n * n_classes), chunks(n);
    Array<uint16_t> frequencies(n * table);
    Array<int64_t> listed(n);
    {
        nb::gil_scoped_release release;
        run_jobs((n + slice - 1) / slice, n_threads, [&] {
            return [&, builder = ModelBuilder<Count>(max_token)](size_t job) mutable {
                for (size_t p = job * slice; p < std::min(n, (job + 1) * slice); p++) {
                    uint16_t* const rows = frequencies.data.get() + p * table;
                    std::fill(rows, rows + table, uint16_t(0));
                    const size_t at = p * n_classes;
                    builder.build(by_class.data() + p * table, n_by_class.data() + at,
                                  {&weights.data[at], &expected.data[at], &sizes.data[at], &firsts.data[at], rows,
                                   &chunks.data[p], &listed.data[p]});
                }
            };
        });
    }
    return {weights.to_numpy(), expected.to_numpy(),    sizes.to_numpy(), firsts.to_numpy(),
            frequencies.to_numpy(), chunks.to_numpy(), listed.to_numpy()};
}

}  // namespace ww

NB_MODULE(_native, m) {
    using namespace ww;
    nb::set_leak_warnings(false);
    nb::exception<CorruptStream>(m, "CorruptStream");
    bind_dlpack(m);
    bind_kind<Kind<uint8_t, 0, 0, false>>(m, "u8");
    bind_kind<Kind<uint16_t, 0, 0, false>>(m, "u16");
    bind_kind<Kind<uint32_t, 0, 0, false>>(m, "u32");
    bind_kind<Kind<uint64_t, 0, 0, false>>(m, "u64");
    bind_kind<Kind<uint8_t, 3, 0x0F, true>>(m, "e4m3");
    bind_kind<Kind<uint8_t, 2, 0x1F, true>>(m, "e5m2");
    bind_kind<Kind<uint16_t, 10, 0x1F, true>>(m, "f16");
    bind_kind<Kind<uint16_t, 7, 0xFF, true>>(m, "bf16");
    bind_kind<Kind<uint32_t, 23, 0xFF, true>>(m, "f32");
    bind_kind<Kind<uint64_t, 52, 0x7FF, true>>(m, "f64");
    bind_width<uint8_t>(m, "u8");
    bind_width<uint16_t>(m, "u16");
    bind_width<uint32_t>(m, "u32");
    bind_width<uint64_t>(m, "u64");
    m.def("scatter_all", &scatter_all);
    m.def("join_parts", &join_parts);
    m.def("read_directories", &read_directories);
    m.def("build_models", &build_models<int32_t>);
    m.def("build_models", &build_models<int64_t>);
    m.def("parse_models", &parse_models);
}
