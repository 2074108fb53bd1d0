// Paged attention, linear maps and the small operations around them, for one CPU. Compiled at first use by native_kernels.py
// for the machine it runs on; called through ctypes with plain pointers, so it knows nothing of torch.
//
// Every result is added up in an order that depends on its own row alone: a token has the same bits in a chunk, in a decode and
// in any batch, with any number of threads.
//
// Numbers are bfloat16 or float32; sums are always float32. Vectors are GCC vector extensions of 16 floats, which the
// compiler maps to what the machine has; only the bfloat16 dot product uses intrinsics, where there are some.
//
// One KV head of one block (PAIR is 2 for bfloat16, 1 for float32), chosen so that both products of attention read it as it is:
//
//     K  [dim / PAIR][block_size][PAIR]       16 neighbouring keys at one pair of dims fill one vector
//     V  [block_size / PAIR][dim][PAIR]       16 neighbouring dims at one pair of keys fill one vector

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr int TILE_KEYS = 128;  // keys scored before one softmax update; amortises loading and storing of outputs
constexpr int PANEL = 32;       // outputs of a linear map that are computed together
constexpr int TILE_ROWS = 48;   // query rows (tokens × heads of a group) that share one pass over the keys

typedef float Vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t IVec __attribute__((vector_size(64), aligned(4)));
typedef uint32_t UVec __attribute__((vector_size(64), aligned(4)));
typedef uint16_t HVec __attribute__((vector_size(32), aligned(2)));

// Sums of products are kept in the vectors that the machine has: a compiler keeps wider ones in memory, not in registers.
#if defined(__AVX512F__)
constexpr int NATIVE = LANES;
#elif defined(__AVX__)
constexpr int NATIVE = 8;
#else
constexpr int NATIVE = 4;
#endif
typedef float Wide __attribute__((vector_size(NATIVE * 4), aligned(4)));
typedef uint32_t UWide __attribute__((vector_size(NATIVE * 4), aligned(4)));
constexpr int MIXED_PARTS = NATIVE == LANES ? 4 : 2;  // as many as fit into the registers beside each other

const IVec COUNT = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline Vec splat(float x) { return Vec{} + x; }
inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }
// Horizontal reductions, by halves: lane by lane they would cost more than the products they follow.
template <typename Combine>
inline float folded(Vec x, Combine combine) {
    x = combine(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = combine(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = combine(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    x = combine(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return x[0];
}
inline Vec greater(Vec x, Vec y) { return x > y ? x : y; }
inline float sum(Vec x) {
    return folded(x, [](Vec a, Vec b) { return a + b; });
}
inline float largest(Vec x) { return folded(x, greater); }

inline float widen(uint16_t x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
inline UVec round_bits(Vec x) {  // to nearest, ties to even; NaN stays NaN
    UVec bits = reinterpret_cast<UVec>(x);
    UVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (x == x) ? rounded : UVec{} + 0x7fc0u;
}
inline uint16_t narrow(float x) { return static_cast<uint16_t>(round_bits(splat(x))[0]); }

// e^x to about 2 ulp in float32; anything below -87 becomes 0, -inf included.
inline Vec exponential(Vec x) {
    IVec alive = x > splat(-87.0f);
    x = alive ? x : splat(0.0f);
    x = x < splat(88.0f) ? x : splat(88.0f);
    Vec scaled = x * 1.44269504f + (x < splat(0.0f) ? splat(-0.5f) : splat(0.5f));
    IVec power = __builtin_convertvector(scaled, IVec);
    Vec n = __builtin_convertvector(power, Vec);
    Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Vec result = p * reinterpret_cast<Vec>((power + 127) << 23);
    return alive ? result : splat(0.0f);
}

struct Bf16 {
    typedef uint16_t Element;
    static constexpr int PAIR = 2;
    static float wide(Element x) { return widen(x); }
    static Element narrowed(float x) { return narrow(x); }
    static Vec load16(const Element* p) {
        HVec half = *reinterpret_cast<const HVec*>(p);
        return reinterpret_cast<Vec>(__builtin_convertvector(half, UVec) << 16);
    }
    static void store16(Element* p, Vec x) {
#if defined(__AVX512BF16__)
        __m256bh half = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(x));
        std::memcpy(p, &half, sizeof half);
#else
        *reinterpret_cast<HVec*>(p) = __builtin_convertvector(round_bits(x), HVec);
#endif
    }
    // acc[i] += a[0] * b[i][0] + a[1] * b[i][1]
    static Wide multiply_add(Wide acc, const Element* a, const Element* b) {
#if defined(__AVX512BF16__)
        int32_t pair;
        std::memcpy(&pair, a, 4);
        return reinterpret_cast<Wide>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc),
                                                       reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)),
                                                       reinterpret_cast<__m512bh>(_mm512_loadu_si512(b))));
#else
        UWide both = *reinterpret_cast<const UWide*>(b);
        acc += reinterpret_cast<Wide>(both << 16) * widen(a[0]);
        return acc + reinterpret_cast<Wide>(both & 0xffff0000u) * widen(a[1]);
#endif
    }
};

struct F32 {
    typedef float Element;
    static constexpr int PAIR = 1;
    static float wide(Element x) { return x; }
    static Element narrowed(float x) { return x; }
    static Vec load16(const Element* p) { return load(p); }
    static void store16(Element* p, Vec x) { store(p, x); }
    static Wide multiply_add(Wide acc, const Element* a, const Element* b) {
        return acc + *reinterpret_cast<const Wide*>(b) * a[0];
    }
};

}  // namespace

#include "quantised.h"

extern "C" {

// Everything about one layer's call that does not change with the number format. Strides count elements.
struct AttentionArguments {
    const void* query;
    int64_t query_token_stride, query_head_stride;
    void* out;  // [tokens, heads, value_dim], contiguous
    const void* keys;
    const void* values;
    int64_t block_stride, key_head_stride, value_head_stride;
    const int32_t* query_starts;
    const int32_t* contexts;
    const int32_t* tables;
    int64_t table_stride;
    const float* sinks;  // one a query head, or null
    int32_t sequences, heads, kv_heads, key_dim, value_dim, block_size;
    int32_t window;  // 0: none
    float scaling;
    float softcap;  // 0: none
    int32_t threads;
};

struct WriteArguments {
    const void* key;
    const void* value;
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    void* keys;
    void* values;
    int64_t block_stride, key_pool_head_stride, value_pool_head_stride;
    const int32_t* blocks;
    const int32_t* offsets;
    int32_t tokens, kv_heads, key_dim, value_dim, block_size;
    int32_t threads;
};

struct RotateArguments {
    void* qkv;  // [tokens, heads + 2 * kv_heads, dim]: q and k are rotated in place
    int64_t token_stride;
    const void* cosines;  // [tokens, dim]
    const void* sines;
    const float* query_norm;  // [dim] weights, or null
    const float* key_norm;
    float epsilon;
    int32_t tokens, heads, kv_heads, dim;
    int32_t threads;
};

// Neighbouring outputs of a linear map in one format: FLOATS in panels of PANEL outputs, others as quantised.h says.
struct Part {
    const void* panels;
    int32_t format, outputs;
};

constexpr int PARTS_MAX = 4;

// A linear map and its bias, [outputs rounded up to PANEL], or null.
struct Map {
    Part parts[PARTS_MAX];
    const float* bias;
    int32_t count, dim, outputs;
};

// What of a decoder layer is the same in every step.
struct LayerArguments {
    const float* first_norm;
    const float* second_norm;
    const float* query_norm;  // or null
    const float* key_norm;
    Map qkv, o, gate_up, down;
    void* keys;
    void* values;
    int64_t block_stride, key_head_stride, value_head_stride;
    float first_epsilon, second_epsilon, qk_epsilon;
    float scaling, softcap;
    int32_t window, heads, kv_heads, dim, block_size, gate_kind;
};

// What of a step is the same in every layer.
struct StepArguments {
    const void* cosines;  // [tokens, dim]
    const void* sines;
    const int32_t* write_blocks;
    const int32_t* write_offsets;
    const int32_t* query_starts;
    const int32_t* contexts;
    const int32_t* tables;
    int64_t table_stride;
    void* scratch;  // LayerArguments' widths of each token, see `layer`
    int32_t tokens, sequences;
    int32_t threads;
};

}  // extern "C"

namespace {

// Each operation is a function with worksharing loops, which the threads of a team call together. An entry point makes a team
// for one operation, or for a whole layer.

inline Wide& wide(float* p) { return *reinterpret_cast<Wide*>(p); }

// scores[r][j] = Q[r] · K[j] for PARTS × NATIVE keys
template <typename T, int ROWS, int PARTS>
inline void score_panel(const typename T::Element* query, int query_stride, const typename T::Element* keys, int dim,
                        int block_size, float* scores, int score_stride) {
    Wide acc[ROWS][PARTS];
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PARTS; p++) acc[r][p] = Wide{};
    for (int d = 0; d < dim; d += T::PAIR) {
        const typename T::Element* line = keys + static_cast<int64_t>(d) * block_size;
        for (int p = 0; p < PARTS; p++)
            for (int r = 0; r < ROWS; r++)
                acc[r][p] = T::multiply_add(acc[r][p], query + r * query_stride + d, line + p * NATIVE * T::PAIR);
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PARTS; p++) wide(scores + r * score_stride + p * NATIVE) = acc[r][p];
}

template <typename T, int PARTS>
inline void score_rows(const typename T::Element* query, int rows, const typename T::Element* keys, int dim, int block_size,
                       float* scores, int score_stride) {
    int r = 0;
#define BATON_SCORE(ROWS) \
    score_panel<T, ROWS, PARTS>(query + r * dim, dim, keys, dim, block_size, scores + r * stride, score_stride)
    const int64_t stride = score_stride;
    for (; r + 6 <= rows; r += 6) BATON_SCORE(6);
    for (; r + 3 <= rows; r += 3) BATON_SCORE(3);
    for (; r < rows; r++) BATON_SCORE(1);
#undef BATON_SCORE
}

template <typename T>
void score_block(const typename T::Element* query, int rows, const typename T::Element* keys, int dim, int block_size,
                 float* scores, int score_stride) {
    int j = 0;
    for (; j + 2 * NATIVE <= block_size; j += 2 * NATIVE)
        score_rows<T, 2>(query, rows, keys + j * T::PAIR, dim, block_size, scores + j, score_stride);
    for (; j < block_size; j += NATIVE)
        score_rows<T, 1>(query, rows, keys + j * T::PAIR, dim, block_size, scores + j, score_stride);
}

// out[r] += P[r] · V over the first `keys` keys of a block
template <typename T, int ROWS, int PARTS>
inline void mix_panel(const typename T::Element* weights, int weight_stride, const typename T::Element* values, int dim,
                      int keys, float* out, int out_stride) {
    Wide acc[ROWS][PARTS];
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PARTS; p++) acc[r][p] = wide(out + r * out_stride + p * NATIVE);
    for (int j = 0; j < keys; j += T::PAIR) {
        const typename T::Element* line = values + static_cast<int64_t>(j) * dim;
        for (int p = 0; p < PARTS; p++)
            for (int r = 0; r < ROWS; r++)
                acc[r][p] = T::multiply_add(acc[r][p], weights + r * weight_stride + j, line + p * NATIVE * T::PAIR);
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PARTS; p++) wide(out + r * out_stride + p * NATIVE) = acc[r][p];
}

template <typename T, int PARTS>
inline void mix_rows(const typename T::Element* weights, int weight_stride, int rows, const typename T::Element* values,
                     int dim, int keys, float* out, int out_stride) {
    int r = 0;
#define BATON_MIX(ROWS) \
    mix_panel<T, ROWS, PARTS>(weights + r * weight_stride, weight_stride, values, dim, keys, out + r * out_stride, out_stride)
    for (; r + 4 <= rows; r += 4) BATON_MIX(4);
    for (; r + 3 <= rows; r += 3) BATON_MIX(3);
    for (; r < rows; r++) BATON_MIX(1);
#undef BATON_MIX
}

template <typename T>
void mix_block(const typename T::Element* weights, int weight_stride, int rows, const typename T::Element* values, int dim,
               int keys, float* out) {
    int d = 0;
    for (; d + MIXED_PARTS * NATIVE <= dim; d += MIXED_PARTS * NATIVE)
        mix_rows<T, MIXED_PARTS>(weights, weight_stride, rows, values + d * T::PAIR, dim, keys, out + d, dim);
    for (; d < dim; d += NATIVE) mix_rows<T, 1>(weights, weight_stride, rows, values + d * T::PAIR, dim, keys, out + d, dim);
}

// The working memory of one thread.
template <typename T>
struct Scratch {
    std::vector<typename T::Element> query, weights, tail;
    std::vector<float> scores, out, peak, total;
    Scratch(int rows, int key_dim, int value_dim)
        : query(rows * key_dim), weights(rows * TILE_KEYS), tail(2 * value_dim), scores(rows * TILE_KEYS),
          out(rows * value_dim), peak(rows), total(rows) {}
};

// One KV head of one sequence, query tokens [first, first + count) of it.
template <typename T>
class Unit {
    typedef typename T::Element Element;
    const AttentionArguments& a_;
    Scratch<T>& s_;
    int sequence_, kv_head_, first_, count_, group_, rows_;
    int64_t first_position_;  // position of the first query token

    void take_queries() {
        const Element* query = static_cast<const Element*>(a_.query);
        for (int i = 0; i < count_; i++)
            for (int g = 0; g < group_; g++)
                std::memcpy(&s_.query[(i * group_ + g) * a_.key_dim],
                            query + (a_.query_starts[sequence_] + first_ + i) * a_.query_token_stride +
                                (kv_head_ * group_ + g) * a_.query_head_stride,
                            a_.key_dim * sizeof(Element));
    }

    // The first key that query token i sees.
    int64_t lowest(int i) const {
        int64_t low = a_.window ? first_position_ + i - a_.window + 1 : 0;
        return low > 0 ? low : 0;
    }

    // Scales, caps and masks the scores of query token i for keys [begin, begin + keys); the greatest of them.
    float soften(float* line, int i, int64_t begin, int keys) const {
        const int64_t low = lowest(i) - begin, high = first_position_ + i - begin;  // seen: low <= j <= high
        const Vec none = splat(-std::numeric_limits<float>::infinity());
        Vec best = none;
        for (int j = 0; j < keys; j += LANES) {
            Vec x = load(line + j) * a_.scaling;
            if (a_.softcap) {
                Vec e = exponential(x * (2.0f / a_.softcap));
                x = a_.softcap * (e - 1.0f) / (e + 1.0f);
            }
            if (low > j || high < j + LANES - 1) {
                IVec at = COUNT + j;
                int32_t first = static_cast<int32_t>(low < -1 ? -1 : low > keys ? keys : low);
                int32_t last = static_cast<int32_t>(high < -1 ? -1 : high > keys ? keys : high);
                x = ((at >= first) & (at <= last)) ? x : none;
            }
            best = greater(best, x);
            store(line + j, x);
        }
        return largest(best);
    }

    // Turns scores of keys [begin, begin + keys) into weights, and brings outputs and totals to the new peak.
    void weigh(int64_t begin, int keys) {
        for (int r = 0; r < rows_; r++) {
            float* line = &s_.scores[r * TILE_KEYS];
            Element* weights = &s_.weights[r * TILE_KEYS];
            float peak = soften(line, r / group_, begin, keys);
            if (peak < s_.peak[r]) peak = s_.peak[r];
            if (peak == -std::numeric_limits<float>::infinity()) {  // nothing seen yet
                std::memset(weights, 0, keys * sizeof(Element));
                continue;
            }
            float shrink = std::exp(s_.peak[r] - peak);
            Vec total = splat(0.0f);
            for (int j = 0; j < keys; j += LANES) {
                Vec e = exponential(load(line + j) - peak);
                total += e;
                T::store16(weights + j, e);
            }
            s_.total[r] = s_.total[r] * shrink + sum(total);
            if (shrink != 1.0f)
                for (int d = 0; d < a_.value_dim; d += LANES)
                    store(&s_.out[r * a_.value_dim + d], load(&s_.out[r * a_.value_dim + d]) * shrink);
            s_.peak[r] = peak;
        }
    }

    void mix(const Element* values, const Element* weights, int keys) {
        int whole = keys / T::PAIR * T::PAIR;
        mix_block<T>(weights, TILE_KEYS, rows_, values, a_.value_dim, whole, s_.out.data());
        if (whole == keys) return;
        // the partner of the last key was never written and may hold anything, NaN too: 0 × NaN is NaN
        for (int d = 0; d < a_.value_dim; d++) {
            s_.tail[2 * d] = values[whole * a_.value_dim + 2 * d];
            s_.tail[2 * d + 1] = 0;
        }
        mix_block<T>(weights + whole, TILE_KEYS, rows_, s_.tail.data(), a_.value_dim, T::PAIR, s_.out.data());
    }

    // Ask for a block's K or V ahead of use: blocks lie far apart, and no hardware guesses the next.
    void fetch(const Element* from, int dim) const {
        const char* bytes = reinterpret_cast<const char*>(from);
        for (int64_t at = 0; at < static_cast<int64_t>(dim) * a_.block_size * static_cast<int64_t>(sizeof(Element)); at += 64)
            __builtin_prefetch(bytes + at, 0, 2);
    }

    void begin() {
        std::fill(s_.out.begin(), s_.out.begin() + rows_ * a_.value_dim, 0.0f);
        for (int r = 0; r < rows_; r++) {
            s_.peak[r] = a_.sinks ? a_.sinks[kv_head_ * group_ + r % group_] : -std::numeric_limits<float>::infinity();
            s_.total[r] = a_.sinks ? 1.0f : 0.0f;  // a sink is one more key, of value zero
        }
    }

    void give() {
        Element* out = static_cast<Element*>(a_.out);
        for (int r = 0; r < rows_; r++) {
            int64_t token = a_.query_starts[sequence_] + first_ + r / group_;
            Element* line = out + (token * a_.heads + kv_head_ * group_ + r % group_) * a_.value_dim;
            float share = s_.total[r] > 0.0f ? 1.0f / s_.total[r] : 0.0f;
            for (int d = 0; d < a_.value_dim; d += LANES) T::store16(line + d, load(&s_.out[r * a_.value_dim + d]) * share);
        }
    }

public:
    Unit(const AttentionArguments& a, Scratch<T>& s, int sequence, int kv_head, int first, int count)
        : a_(a), s_(s), sequence_(sequence), kv_head_(kv_head), first_(first), count_(count), group_(a.heads / a.kv_heads),
          rows_(count * group_) {
        int length = a.query_starts[sequence + 1] - a.query_starts[sequence];
        first_position_ = a.contexts[sequence] - length + first;
    }

    void run() {
        take_queries();
        begin();
        const int size = a_.block_size, blocks_a_tile = TILE_KEYS / size;
        const int64_t end = first_position_ + count_;
        const int32_t* table = a_.tables + sequence_ * a_.table_stride;
        const Element* keys = static_cast<const Element*>(a_.keys) + kv_head_ * a_.key_head_stride;
        const Element* values = static_cast<const Element*>(a_.values) + kv_head_ * a_.value_head_stride;
        const int64_t last = (end - 1) / size;
        // Tiles begin at multiples of a tile, whatever the window: so a row adds up alike in a chunk and in a decode.
        for (int64_t block = lowest(0) / TILE_KEYS * blocks_a_tile; block <= last; block += blocks_a_tile) {
            int64_t count = last - block + 1 < blocks_a_tile ? last - block + 1 : blocks_a_tile;
            for (int64_t b = 0; b < count; b++) {
                fetch(values + table[block + b] * a_.block_stride, a_.value_dim);
                if (block + b < last) fetch(keys + table[block + b + 1] * a_.block_stride, a_.key_dim);
                score_block<T>(s_.query.data(), rows_, keys + table[block + b] * a_.block_stride, a_.key_dim, size,
                               &s_.scores[b * size], TILE_KEYS);
            }
            weigh(block * size, static_cast<int>(count * size));
            for (int64_t b = 0; b < count; b++) {
                int64_t left = end - (block + b) * size;
                const Element* there = values + table[block + b] * a_.block_stride;
                mix(there, &s_.weights[b * size], static_cast<int>(left < size ? left : size));
            }
        }
        give();
    }
};

template <typename T>
void attend_team(const AttentionArguments& a) {
    const int group = a.heads / a.kv_heads;
    const int tokens_a_unit = group < TILE_ROWS ? TILE_ROWS / group : 1;
    struct Piece { int sequence, first, count; };
    std::vector<Piece> pieces;
    for (int s = 0; s < a.sequences; s++) {
        int length = a.query_starts[s + 1] - a.query_starts[s];
        for (int first = 0; first < length; first += tokens_a_unit)
            pieces.push_back({s, first, length - first < tokens_a_unit ? length - first : tokens_a_unit});
    }
    const int units = static_cast<int>(pieces.size()) * a.kv_heads;
    Scratch<T> scratch(tokens_a_unit * group, a.key_dim, a.value_dim);
#pragma omp for schedule(dynamic, 1)
    for (int u = units - 1; u >= 0; u--) {  // late pieces see the most keys: begin with them
        const Piece& piece = pieces[u / a.kv_heads];
        Unit<T>(a, scratch, piece.sequence, u % a.kv_heads, piece.first, piece.count).run();
    }
}

template <typename T>
void write_team(const WriteArguments& w) {
    typedef typename T::Element Element;
    const Element* key = static_cast<const Element*>(w.key);
    const Element* value = static_cast<const Element*>(w.value);
    Element* keys = static_cast<Element*>(w.keys);
    Element* values = static_cast<Element*>(w.values);
#pragma omp for schedule(static)
    for (int t = 0; t < w.tokens; t++) {
        const int64_t block = w.blocks[t] * w.block_stride;
        const int64_t offset = w.offsets[t];
        for (int h = 0; h < w.kv_heads; h++) {
            const Element* from = key + t * w.key_token_stride + h * w.key_head_stride;
            Element* to = keys + block + h * w.key_pool_head_stride + offset * T::PAIR;
            for (int d = 0; d < w.key_dim; d += T::PAIR)
                std::memcpy(to + static_cast<int64_t>(d) * w.block_size, from + d, T::PAIR * sizeof(Element));
            from = value + t * w.value_token_stride + h * w.value_head_stride;
            to = values + block + h * w.value_pool_head_stride + offset / T::PAIR * T::PAIR * w.value_dim + offset % T::PAIR;
            for (int d = 0; d < w.value_dim; d++) to[d * T::PAIR] = from[d];
        }
    }
}

template <typename T>
void rotate_head(typename T::Element* x, const typename T::Element* cosines, const typename T::Element* sines, int dim,
                 const float* norm, float epsilon) {
    const int half = dim / 2;
    float scale = 1.0f;
    if (norm) {
        Vec squares = splat(0.0f);
        for (int d = 0; d < dim; d += LANES) squares += T::load16(x + d) * T::load16(x + d);
        scale = 1.0f / std::sqrt(sum(squares) / dim + epsilon);
    }
    for (int d = 0; d < half; d += LANES) {
        Vec a = T::load16(x + d), b = T::load16(x + half + d);
        if (norm) {
            a = a * scale * load(norm + d);
            b = b * scale * load(norm + half + d);
        }
        T::store16(x + d, a * T::load16(cosines + d) - b * T::load16(sines + d));
        T::store16(x + half + d, b * T::load16(cosines + half + d) + a * T::load16(sines + half + d));
    }
}

template <typename T>
void rotate_team(const RotateArguments& r) {
    typedef typename T::Element Element;
#pragma omp for schedule(static)
    for (int t = 0; t < r.tokens; t++) {
        Element* row = static_cast<Element*>(r.qkv) + t * r.token_stride;
        const Element* cosines = static_cast<const Element*>(r.cosines) + static_cast<int64_t>(t) * r.dim;
        const Element* sines = static_cast<const Element*>(r.sines) + static_cast<int64_t>(t) * r.dim;
        for (int h = 0; h < r.heads + r.kv_heads; h++)
            rotate_head<T>(row + h * r.dim, cosines, sines, r.dim, h < r.heads ? r.query_norm : r.key_norm, r.epsilon);
    }
}

constexpr int LINEAR_ROWS = 96;  // rows that share one pass over a panel
constexpr int GATE_PIECE = 256;  // columns of a row that one thread takes

// The normed rows, also quantised where `groups` is not null.
template <typename T>
void norm_team(const void* x_, const float* weight, void* out_, Group* groups, int64_t rows, int dim, float epsilon) {
    typedef typename T::Element Element;
    const Element* x = static_cast<const Element*>(x_);
    Element* out = static_cast<Element*>(out_);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const Element* from = x + row * dim;
        Vec squares = splat(0.0f);
        for (int d = 0; d < dim; d += LANES) squares += T::load16(from + d) * T::load16(from + d);
        const float scale = 1.0f / std::sqrt(sum(squares) / dim + epsilon);
        for (int d = 0; d < dim; d += LANES) T::store16(out + row * dim + d, T::load16(from + d) * scale * load(weight + d));
        if (groups) quantise<T>(out + row * dim, dim, groups + row * (dim / GROUP));
    }
}

inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exponential(-x)); }

// out = activation(gate) * up, where a row holds gate and up side by side; also quantised where `groups` is not null.
// kind 0: silu, 1: gelu in its tanh form.
template <typename T>
void gate_team(const void* x_, void* out_, Group* groups, int64_t rows, int dim, int kind) {
    typedef typename T::Element Element;
    const Element* x = static_cast<const Element*>(x_);
    Element* out = static_cast<Element*>(out_);
    const int pieces = (dim + GATE_PIECE - 1) / GATE_PIECE;
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < rows * pieces; unit++) {
        const int64_t row = unit / pieces;
        const int begin = static_cast<int>(unit % pieces) * GATE_PIECE, end = std::min(dim, begin + GATE_PIECE);
        const Element* gates = x + row * 2 * dim;
        for (int d = begin; d < end; d += LANES) {
            Vec g = T::load16(gates + d);
            // gelu_tanh(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x³))
            Vec steep = kind == 0 ? g : 1.5957691216f * (g + 0.044715f * g * g * g);
            T::store16(out + row * dim + d, g * sigmoid(steep) * T::load16(gates + dim + d));
        }
        if (groups) quantise<T>(out + row * dim + begin, end - begin, groups + (row * dim + begin) / GROUP);
    }
}

template <typename T>
void quantise_team(const void* x_, Group* groups, int64_t rows, int dim) {
    const typename T::Element* x = static_cast<const typename T::Element*>(x_);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) quantise<T>(x + row * dim, dim, groups + row * (dim / GROUP));
}

inline bool takes_groups(const Map& map) {
    for (int p = 0; p < map.count; p++)
        if (map.parts[p].format != FLOATS) return true;
    return false;
}

// One product and where its results go: out[r] = x[r] · W + bias + residual[r], rounded once, from column `first` on.
template <typename T>
struct Product {
    const Map& map;
    const typename T::Element* x;  // [rows, dim], contiguous
    const Group* groups;           // [rows, dim / GROUP], or null where no part needs them
    const typename T::Element* residual;  // [rows, outputs], contiguous, or null
    typename T::Element* out;             // [rows, outputs], contiguous
    int rows;

    void give(const float* sums, int row, int first, int count) const {
        const int64_t at = static_cast<int64_t>(row) * map.outputs + first;
        for (int j = 0; j < count; j += LANES) {
            Vec x = load(sums + j);
            if (map.bias) x += load(map.bias + first + j);
            if (residual) x += T::load16(residual + at + j);
            T::store16(out + at + j, x);
        }
    }
};

// The part of floats whose first output is `begin`.
template <typename T>
void linear_team(const Product<T>& product, const Part& part, int begin) {
    typedef typename T::Element Element;
    const Element* all = static_cast<const Element*>(part.panels);
    const int panels = (part.outputs + PANEL - 1) / PANEL, dim = product.map.dim;
    const int pieces = (product.rows + LINEAR_ROWS - 1) / LINEAR_ROWS;
    float sums[LINEAR_ROWS * PANEL];
#pragma omp for schedule(static)
    for (int unit = 0; unit < panels * pieces; unit++) {
        const int panel = unit / pieces, first = unit % pieces * LINEAR_ROWS;
        const int count = std::min(product.rows - first, LINEAR_ROWS);
        score_block<T>(product.x + static_cast<int64_t>(first) * dim, count, all + static_cast<int64_t>(panel) * PANEL * dim, dim,
                       PANEL, sums, PANEL);
        for (int r = 0; r < count; r++)
            product.give(sums + r * PANEL, first + r, begin + panel * PANEL, std::min(part.outputs - panel * PANEL, PANEL));
    }
}

// out[r] = x[r] · outputs [unit * PANEL, (unit + 1) * PANEL) of a quantised part, or as many as it has
inline void unit_product(const Part& part, int unit, const Group* x, int rows, int dim, float* out, int out_stride) {
    constexpr int PANELS = PANEL / LANES;
    const int64_t stride = panel_bytes(part.format, dim);
    const uint8_t* at = static_cast<const uint8_t*>(part.panels) + unit * PANELS * stride;
    const bool is_whole = part.outputs - unit * PANEL > LANES;
    with_format(part.format, [&](auto f) {
        (is_whole ? panel_product<decltype(f), PANELS> : panel_product<decltype(f), 1>)(at, stride, x, rows, dim / GROUP, out,
                                                                                         out_stride);
    });
}

inline int quantised_units(const Part& part) { return part.format == FLOATS ? 0 : (part.outputs + PANEL - 1) / PANEL; }

// The quantised parts together, so that threads have equal shares of all.
template <typename T>
void quantised_team(const Product<T>& product) {
    const Map& map = product.map;
    int units = 0;
    for (int p = 0; p < map.count; p++) units += quantised_units(map.parts[p]);
    const int pieces = (product.rows + LINEAR_ROWS - 1) / LINEAR_ROWS;
    float sums[LINEAR_ROWS * PANEL];
#pragma omp for schedule(static)
    for (int each = 0; each < units * pieces; each++) {
        int unit = each / pieces, begin = 0, p = 0;
        for (; unit >= quantised_units(map.parts[p]); p++) {
            unit -= quantised_units(map.parts[p]);
            begin += map.parts[p].outputs;
        }
        const int first = each % pieces * LINEAR_ROWS, count = std::min(product.rows - first, LINEAR_ROWS);
        const Group* x = product.groups + static_cast<int64_t>(first) * (map.dim / GROUP);
        unit_product(map.parts[p], unit, x, count, map.dim, sums, PANEL);
        const int outputs = std::min(map.parts[p].outputs - unit * PANEL, PANEL);
        for (int r = 0; r < count; r++) product.give(sums + r * PANEL, first + r, begin + unit * PANEL, outputs);
    }
}

template <typename T>
void map_team(const Map& map, const void* x, const Group* groups, const void* residual, void* out, int rows) {
    typedef typename T::Element Element;
    const Product<T> product = {map, static_cast<const Element*>(x), groups, static_cast<const Element*>(residual),
                                static_cast<Element*>(out), rows};
    for (int p = 0, begin = 0; p < map.count; begin += map.parts[p++].outputs)
        if (map.parts[p].format == FLOATS) linear_team<T>(product, map.parts[p], begin);
    if (takes_groups(map)) quantised_team<T>(product);
}

// out[r] = x[r] · W in float32 for a map of one part; `out` has room for whole panels.
template <typename T>
void head_team(const Map& map, const void* x_, const Group* groups, float* out, int rows) {
    typedef typename T::Element Element;
    const Part& part = map.parts[0];
    const Element* x = static_cast<const Element*>(x_);
    const Element* all = static_cast<const Element*>(part.panels);
    const int panels = (part.outputs + PANEL - 1) / PANEL;
#pragma omp for schedule(static)
    for (int p = 0; p < panels; p++)
        if (part.format == FLOATS)
            score_block<T>(x, rows, all + static_cast<int64_t>(p) * PANEL * map.dim, map.dim, PANEL, out + p * PANEL,
                           panels * PANEL);
        else
            unit_product(part, p, groups, rows, map.dim, out + p * PANEL, panels * PANEL);
}

// One decoder layer of the common kind, x and out [tokens, width].
template <typename T>
void layer_team(const LayerArguments& l, const StepArguments& s, const void* x, void* out) {
    typedef typename T::Element Element;
    const int64_t tokens = s.tokens;
    const int width = l.qkv.dim, inner = l.down.dim, heads_width = l.heads * l.dim;
    Element* normed = static_cast<Element*>(s.scratch);
    Element* qkv = normed + tokens * width;
    Element* attended = qkv + tokens * l.qkv.outputs;
    Element* middle = attended + tokens * heads_width;
    Element* both = middle + tokens * width;
    Element* gated = both + tokens * 2 * inner;
    Group* groups = reinterpret_cast<Group*>(gated + tokens * inner);
    const Element* key = qkv + heads_width;
    const Element* value = key + l.kv_heads * l.dim;

    norm_team<T>(x, l.first_norm, normed, takes_groups(l.qkv) ? groups : nullptr, tokens, width, l.first_epsilon);
    map_team<T>(l.qkv, normed, groups, nullptr, qkv, s.tokens);
    rotate_team<T>({qkv, l.qkv.outputs, s.cosines, s.sines, l.query_norm, l.key_norm, l.qk_epsilon, s.tokens, l.heads,
                    l.kv_heads, l.dim, 0});
    write_team<T>({key, value, l.qkv.outputs, l.dim, l.qkv.outputs, l.dim, l.keys, l.values, l.block_stride, l.key_head_stride,
                   l.value_head_stride, s.write_blocks, s.write_offsets, s.tokens, l.kv_heads, l.dim, l.dim, l.block_size, 0});
    attend_team<T>({qkv, l.qkv.outputs, l.dim, attended, l.keys, l.values, l.block_stride, l.key_head_stride,
                    l.value_head_stride, s.query_starts, s.contexts, s.tables, s.table_stride, nullptr, s.sequences, l.heads,
                    l.kv_heads, l.dim, l.dim, l.block_size, l.window, l.scaling, l.softcap, 0});
    if (takes_groups(l.o)) quantise_team<T>(attended, groups, tokens, heads_width);
    map_team<T>(l.o, attended, groups, x, middle, s.tokens);
    norm_team<T>(middle, l.second_norm, normed, takes_groups(l.gate_up) ? groups : nullptr, tokens, width, l.second_epsilon);
    map_team<T>(l.gate_up, normed, groups, nullptr, both, s.tokens);
    gate_team<T>(both, gated, takes_groups(l.down) ? groups : nullptr, tokens, inner, l.gate_kind);
    map_team<T>(l.down, gated, groups, middle, out, s.tokens);
}

template <typename Work>
inline void in_team(int threads, Work work) {
#pragma omp parallel num_threads(threads)
    work();
}

// For small operations, where few rows are not worth waking other threads.
inline int threads_for(int64_t rows, int threads) { return rows > 8 ? threads : 1; }

}  // namespace

// The same entry points for both number formats.
#define BATON_ENTRIES(SUFFIX, TYPE)                                                                                       \
    void baton_attend_##SUFFIX(const AttentionArguments* a) {                                                             \
        in_team(a->threads, [=] { attend_team<TYPE>(*a); });                                                              \
    }                                                                                                                     \
    void baton_write_##SUFFIX(const WriteArguments* w) {                                                                  \
        in_team(threads_for(w->tokens, w->threads), [=] { write_team<TYPE>(*w); });                                       \
    }                                                                                                                     \
    void baton_rotate_##SUFFIX(const RotateArguments* r) {                                                                \
        in_team(threads_for(r->tokens, r->threads), [=] { rotate_team<TYPE>(*r); });                                      \
    }                                                                                                                     \
    void baton_norm_##SUFFIX(const void* x, const float* weight, void* out, int64_t rows, int dim, float epsilon,         \
                             int threads) {                                                                               \
        in_team(threads_for(rows, threads), [=] { norm_team<TYPE>(x, weight, out, nullptr, rows, dim, epsilon); });       \
    }                                                                                                                     \
    void baton_gate_##SUFFIX(const void* x, void* out, int64_t rows, int dim, int kind, int threads) {                    \
        in_team(threads_for(rows, threads), [=] { gate_team<TYPE>(x, out, nullptr, rows, dim, kind); });                  \
    }                                                                                                                     \
    void baton_head_##SUFFIX(const Map* map, const void* x, void* groups, float* out, int rows, int threads) {            \
        in_team(threads, [=] {                                                                                            \
            if (takes_groups(*map)) quantise_team<TYPE>(x, static_cast<Group*>(groups), rows, map->dim);                  \
            head_team<TYPE>(*map, x, static_cast<Group*>(groups), out, rows);                                             \
        });                                                                                                               \
    }                                                                                                                     \
    void baton_linear_##SUFFIX(const Map* map, const void* x, void* groups, const void* residual, void* out, int rows,    \
                               int threads) {                                                                             \
        in_team(threads, [=] {                                                                                            \
            if (takes_groups(*map)) quantise_team<TYPE>(x, static_cast<Group*>(groups), rows, map->dim);                  \
            map_team<TYPE>(*map, x, static_cast<Group*>(groups), residual, out, rows);                                    \
        });                                                                                                               \
    }                                                                                                                     \
    void baton_lookup_##SUFFIX(const void* panels, int format, const int64_t* ids, int count, int dim, void* out, int threads) {\
        in_team(threads_for(count, threads),                                                                              \
                [=] { lookup_team<TYPE>(static_cast<const uint8_t*>(panels), format, ids, count, dim, out); });           \
    }                                                                                                                     \
    void baton_encode_##SUFFIX(int format, const void* rows, int outputs, int dim, void* out, int threads) {              \
        in_team(threads, [=] { encode_team<TYPE>(format, rows, outputs, dim, static_cast<uint8_t*>(out)); });             \
    }                                                                                                                     \
    void baton_layer_##SUFFIX(const LayerArguments* l, const StepArguments* s, const void* x, void* out) {                \
        in_team(s->threads, [=] { layer_team<TYPE>(*l, *s, x, out); });                                                   \
    }

extern "C" {
BATON_ENTRIES(bf16, Bf16)
BATON_ENTRIES(f32, F32)

int64_t baton_panel_bytes(int format, int dim) { return panel_bytes(format, dim); }

void baton_pack(int format, const void* rows, const int64_t* order, int outputs, int dim, void* out, int threads) {
    in_team(threads, [=] {
        pack_team(format, static_cast<const uint8_t*>(rows), order, outputs, dim, static_cast<uint8_t*>(out));
    });
}
}
