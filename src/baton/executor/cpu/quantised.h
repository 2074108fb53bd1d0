// Linear maps whose weights stay quantised: groups of 32 small integers with a scale each, in the formats of GGUF files. A row
// of activations is quantised to int8 in groups of 32 too; integers are multiplied and added up exactly, and the sums of the
// groups are added in their order by fused multiply-adds. So a row has the same bits in every batch, with any number of threads
// and on every kind of CPU.
//
// Weights lie in panels of LANES outputs. Each block of a panel holds what LANES rows of the file hold of one block of inputs,
// reordered without growing (K formats by a fortieth: their scales get whole bytes):
//
//     scales     [LANES] float16, then minima of the formats that have them
//     integers   [step][LANES][4]: one vector is 4 inputs of LANES outputs; their bits are split as each format says
//
// Included by kernels.cpp, which has the vectors.

#if defined(__x86_64__)
#include <immintrin.h>
#endif

extern "C" {

// The integers in which a map's weights are stored.
enum Format { FLOATS, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };

// A group of activations: x[i] ≈ scale · q[i].
struct Group {
    int8_t q[32];
    float scale;
    float sum;         // scale · the sum of q
    int32_t halves[2];  // the sums of q[0..16) and q[16..32)
};

}  // extern "C"

namespace {

constexpr int GROUP = 32;
constexpr int STEPS = 8;  // vectors of weights a group: 4 inputs each
#if defined(__AVX512F__)
constexpr int ROWS_MAX = 6;  // rows whose sums for two panels fit in the registers
#else
constexpr int ROWS_MAX = 2;
#endif

typedef uint8_t Bytes __attribute__((vector_size(64), aligned(1)));
typedef uint16_t Shorts __attribute__((vector_size(64), aligned(1)));
typedef uint8_t QuarterBytes __attribute__((vector_size(16), aligned(1)));
typedef int8_t SignedQuarterBytes __attribute__((vector_size(16), aligned(1)));

inline IVec splat_int(int32_t x) { return IVec{} + x; }
// As `splat`, which has to add a zero: -0 becomes 0.
inline Vec broadcast(float x) { return Vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// a · b + c, rounded once on every CPU: what the compiler makes of a * b + c depends on the CPU.
inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return reinterpret_cast<Vec>(
        _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// The value of a float16 that is finite, as scales are.
inline float half_value(uint16_t x) {
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16, exponent = x >> 10 & 31, fraction = x & 1023;
    if (!exponent) {
        float small = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
        return sign ? -small : small;
    }
    uint32_t bits = sign | (exponent + 112) << 23 | fraction << 13;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

inline Vec load_halves(const uint8_t* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#else
    uint16_t halves[LANES];
    std::memcpy(halves, p, sizeof halves);
    Vec x = splat(0.0f);
    for (int i = 0; i < LANES; i++) x[i] = half_value(halves[i]);
    return x;
#endif
}

inline Vec load_bytes(const uint8_t* p) {
    return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const QuarterBytes*>(p), IVec), Vec);
}

// acc[i] += w[4 i .. 4 i + 4) · a[0 .. 4), exactly. WIDE: weights above 127.
template <bool WIDE>
inline IVec dot4(IVec acc, Bytes w, const int8_t* a) {
    int32_t four;
    std::memcpy(&four, a, 4);
#if defined(__AVX512VNNI__)
    return reinterpret_cast<IVec>(
        _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(acc), reinterpret_cast<__m512i>(w), _mm512_set1_epi32(four)));
#elif defined(__AVX2__)
    union { IVec whole; __m256i parts[2]; } sums = {acc};
    union { Bytes whole; __m256i parts[2]; } weights = {w};
    const __m256i x = _mm256_set1_epi32(four);
    for (int p = 0; p < 2; p++) {
#if defined(__AVXVNNI__)
        sums.parts[p] = _mm256_dpbusd_avx_epi32(sums.parts[p], weights.parts[p], x);
#else
        // Products of pairs must fit in 16 bits: the topmost bit of wide weights goes by itself.
        const __m256i low = WIDE ? _mm256_and_si256(weights.parts[p], _mm256_set1_epi8(0x7f)) : weights.parts[p];
        __m256i sum = _mm256_madd_epi16(_mm256_maddubs_epi16(low, x), _mm256_set1_epi16(1));
        if (WIDE) {
            const __m256i top = _mm256_and_si256(_mm256_srli_epi16(weights.parts[p], 7), _mm256_set1_epi8(1));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(top, x), _mm256_set1_epi16(128)));
        }
        sums.parts[p] = _mm256_add_epi32(sums.parts[p], sum);
#endif
    }
    return sums.whole;
#else
    for (int i = 0; i < LANES; i++)
        acc[i] += w[4 * i] * a[0] + w[4 * i + 1] * a[1] + w[4 * i + 2] * a[2] + w[4 * i + 3] * a[3];
    return acc;
#endif
}

// ── how integers of a group are spread over bytes; q are the 32 of one row ───────────────────────────────────────────────────

template <int BITS>
inline Bytes shifted_left(Bytes x) { return reinterpret_cast<Bytes>(reinterpret_cast<Shorts>(x) << BITS); }
template <int BITS>
inline Bytes shifted_right(Bytes x) { return reinterpret_cast<Bytes>(reinterpret_cast<Shorts>(x) >> BITS); }
inline Bytes vector_at(const uint8_t* p) { return *reinterpret_cast<const Bytes*>(p); }

// Whole bytes: 8 vectors.
struct WholeBytes {
    static constexpr int BYTES = 512;
    template <int STEP>
    static Bytes take(const uint8_t* p) { return vector_at(p + STEP * 64); }
    static void put(uint8_t* p, int lane, const uint8_t* q) {
        for (int i = 0; i < GROUP; i++) p[i / 4 * 64 + lane * 4 + i % 4] = q[i];
    }
};

// The low 4 bits: vector j holds step j below and step j + 4 above.
struct LowBits {
    static constexpr int BYTES = 256;
    template <int STEP>
    static Bytes take(const uint8_t* p) {
        Bytes x = vector_at(p + STEP % 4 * 64);
        return (STEP < 4 ? x : shifted_right<4>(x)) & static_cast<uint8_t>(15);
    }
    static void put(uint8_t* p, int lane, const uint8_t* q) {
        for (int i = 0; i < GROUP / 2; i++) p[i / 4 * 64 + lane * 4 + i % 4] = (q[i] & 15) | (q[i + 16] & 15) << 4;
    }
};

// The fifth bit: one vector, step j in bit j.
struct FifthBit {
    static constexpr int BYTES = 64;
    template <int STEP>
    static Bytes take(const uint8_t* p) {
        Bytes x = vector_at(p);
        if constexpr (STEP < 4) x = shifted_left<4 - STEP>(x);
        if constexpr (STEP > 4) x = shifted_right<STEP - 4>(x);
        return x & static_cast<uint8_t>(16);
    }
    static void put(uint8_t* p, int lane, const uint8_t* q) {
        for (int j = 0; j < 4; j++) {
            uint8_t bits = 0;
            for (int step = 0; step < STEPS; step++) bits |= (q[step * 4 + j] >> 4 & 1) << step;
            p[lane * 4 + j] = bits;
        }
    }
};

// The fifth and sixth bits: two vectors, 4 steps each.
struct UpperBits {
    static constexpr int BYTES = 128;
    template <int STEP>
    static Bytes take(const uint8_t* p) {
        Bytes x = vector_at(p + STEP / 4 * 64);
        if constexpr (STEP % 4 < 2) x = shifted_left<4 - 2 * (STEP % 4)>(x);
        if constexpr (STEP % 4 == 3) x = shifted_right<2>(x);
        return x & static_cast<uint8_t>(48);
    }
    static void put(uint8_t* p, int lane, const uint8_t* q) {
        for (int half = 0; half < 2; half++)
            for (int j = 0; j < 4; j++) {
                uint8_t bits = 0;
                for (int step = 0; step < 4; step++) bits |= (q[half * 16 + step * 4 + j] >> 4 & 3) << 2 * step;
                p[half * 64 + lane * 4 + j] = bits;
            }
    }
};

template <typename Low, typename High>
struct Both {
    static constexpr int BYTES = Low::BYTES + High::BYTES;
    template <int STEP>
    static Bytes take(const uint8_t* p) { return Low::template take<STEP>(p) | High::template take<STEP>(p + Low::BYTES); }
    static void put(uint8_t* p, int lane, const uint8_t* q) {
        Low::put(p, lane, q);
        High::put(p + Low::BYTES, lane, q);
    }
};

// Two nibbles a byte, as files have them: 16 low ones, then 16 high ones.
inline void split_nibbles(const uint8_t* from, uint8_t* q) {
    for (int i = 0; i < 16; i++) {
        q[i] = from[i] & 15;
        q[i + 16] = from[i] >> 4;
    }
}

inline void add_fifth_bits(const uint8_t* from, uint8_t* q) {
    for (int i = 0; i < GROUP; i++) q[i] |= (from[i / 8] >> i % 8 & 1) << 4;
}

// ── formats: w = scale · (q - ZERO) + minimum ────────────────────────────────────────────────────────────────────────────────
//
// GROUPS of 32 a block; FILE_BYTES of a block of one row in the file; BYTES of a block of a panel. `pack` puts a row's block
// into its lane of a panel's.

// One group a block: a scale, perhaps a minimum, integers.
template <typename Integers_, int ZERO_, bool MINIMUM_>
struct Plain {
    typedef Integers_ Integers;
    static constexpr int GROUPS = 1, ZERO = ZERO_;
    static constexpr bool MINIMUM = MINIMUM_, SPLIT = false, WIDE = ZERO > 64;
    static constexpr int HEAD = LANES * 2 * (MINIMUM ? 2 : 1), BYTES = HEAD + Integers::BYTES;
    static const uint8_t* integers(const uint8_t* block, int) { return block + HEAD; }
    static Vec scale(const uint8_t* block, int) { return load_halves(block); }
    static Vec minimum(const uint8_t* block, int) { return load_halves(block + LANES * 2); }
    static void put(uint8_t* block, int lane, const uint8_t* head, const uint8_t* q) {
        for (int i = 0; i < HEAD / (LANES * 2); i++) std::memcpy(block + (i * LANES + lane) * 2, head + i * 2, 2);
        Integers::put(block + HEAD, lane, q);
    }
};

struct FormatQ8_0 : Plain<WholeBytes, 128, false> {
    static constexpr int FILE_BYTES = 34;
    static void pack(const uint8_t* from, uint8_t* block, int lane) {
        uint8_t q[GROUP];
        for (int i = 0; i < GROUP; i++) q[i] = from[2 + i] ^ 128;
        put(block, lane, from, q);
    }
};

struct FormatQ4_0 : Plain<LowBits, 8, false> {
    static constexpr int FILE_BYTES = 18;
    static void pack(const uint8_t* from, uint8_t* block, int lane) {
        uint8_t q[GROUP];
        split_nibbles(from + 2, q);
        put(block, lane, from, q);
    }
};

struct FormatQ4_1 : Plain<LowBits, 0, true> {
    static constexpr int FILE_BYTES = 20;
    static void pack(const uint8_t* from, uint8_t* block, int lane) {
        uint8_t q[GROUP];
        split_nibbles(from + 4, q);
        put(block, lane, from, q);
    }
};

struct FormatQ5_0 : Plain<Both<LowBits, FifthBit>, 16, false> {
    static constexpr int FILE_BYTES = 22;
    static void pack(const uint8_t* from, uint8_t* block, int lane) {
        uint8_t q[GROUP];
        split_nibbles(from + 6, q);
        add_fifth_bits(from + 2, q);
        put(block, lane, from, q);
    }
};

struct FormatQ5_1 : Plain<Both<LowBits, FifthBit>, 0, true> {
    static constexpr int FILE_BYTES = 24;
    static void pack(const uint8_t* from, uint8_t* block, int lane) {
        uint8_t q[GROUP];
        split_nibbles(from + 8, q);
        add_fifth_bits(from + 4, q);
        put(block, lane, from, q);
    }
};

// Eight groups a block, whose scales and minima are 6 bits each of the block's: one byte each in a panel.
template <typename Integers_>
struct Super {
    typedef Integers_ Integers;
    static constexpr int GROUPS = 8, ZERO = 0;
    static constexpr bool MINIMUM = true, SPLIT = false, WIDE = false;
    static constexpr int SCALES = LANES * 4, MINIMA = SCALES + LANES * GROUPS, HEAD = MINIMA + LANES * GROUPS;
    static constexpr int BYTES = HEAD + GROUPS * Integers::BYTES;
    static const uint8_t* integers(const uint8_t* block, int group) { return block + HEAD + group * Integers::BYTES; }
    static Vec scale(const uint8_t* block, int group) {
        return load_halves(block) * load_bytes(block + SCALES + group * LANES);
    }
    static Vec minimum(const uint8_t* block, int group) {
        return -(load_halves(block + LANES * 2) * load_bytes(block + MINIMA + group * LANES));
    }
    static void put_head(const uint8_t* from, uint8_t* block, int lane) {
        std::memcpy(block + lane * 2, from, 2);
        std::memcpy(block + LANES * 2 + lane * 2, from + 2, 2);
        const uint8_t* bits = from + 4;
        for (int g = 0; g < GROUPS; g++) {
            const bool low = g < 4;
            block[SCALES + g * LANES + lane] = low ? bits[g] & 63 : (bits[g + 4] & 15) | (bits[g - 4] >> 6) << 4;
            block[MINIMA + g * LANES + lane] = low ? bits[g + 4] & 63 : (bits[g + 4] >> 4) | (bits[g] >> 6) << 4;
        }
    }
};

struct FormatQ4_K : Super<LowBits> {
    static constexpr int FILE_BYTES = 144;
    static void pack(const uint8_t* from, uint8_t* block, int lane) {
        put_head(from, block, lane);
        for (int g = 0; g < GROUPS; g++) {
            uint8_t q[GROUP];
            for (int i = 0; i < GROUP; i++) q[i] = from[16 + g / 2 * GROUP + i] >> g % 2 * 4 & 15;
            Integers::put(block + HEAD + g * Integers::BYTES, lane, q);
        }
    }
};

struct FormatQ5_K : Super<Both<LowBits, FifthBit>> {
    static constexpr int FILE_BYTES = 176;
    static void pack(const uint8_t* from, uint8_t* block, int lane) {
        put_head(from, block, lane);
        for (int g = 0; g < GROUPS; g++) {
            uint8_t q[GROUP];
            for (int i = 0; i < GROUP; i++)
                q[i] = (from[48 + g / 2 * GROUP + i] >> g % 2 * 4 & 15) | (from[16 + i] >> g & 1) << 4;
            Integers::put(block + HEAD + g * Integers::BYTES, lane, q);
        }
    }
};

// Scales are integers for 16 values each: the products of half a group are multiplied by theirs as integers.
struct FormatQ6_K {
    typedef Both<LowBits, UpperBits> Integers;
    static constexpr int GROUPS = 8, ZERO = 32, FILE_BYTES = 210;
    static constexpr bool MINIMUM = false, SPLIT = true, WIDE = false;
    static constexpr int SCALES = LANES * 2, HEAD = SCALES + LANES * 16, BYTES = HEAD + GROUPS * Integers::BYTES;
    static const uint8_t* integers(const uint8_t* block, int group) { return block + HEAD + group * Integers::BYTES; }
    static Vec scale(const uint8_t* block, int) { return load_halves(block); }
    static IVec half_scale(const uint8_t* block, int group, int half) {
        const uint8_t* at = block + SCALES + (group * 2 + half) * LANES;
        return __builtin_convertvector(*reinterpret_cast<const SignedQuarterBytes*>(at), IVec);
    }
    static void pack(const uint8_t* from, uint8_t* block, int lane) {
        std::memcpy(block + lane * 2, from + 208, 2);
        for (int s = 0; s < 16; s++) block[SCALES + s * LANES + lane] = from[192 + s];
        for (int g = 0; g < GROUPS; g++) {  // 128 values of 64 bytes of low bits and 32 of upper bits, twice
            const uint8_t* low = from + g / 4 * 64 + g % 2 * GROUP;
            const uint8_t* upper = from + 128 + g / 4 * 32;
            uint8_t q[GROUP];
            for (int i = 0; i < GROUP; i++) q[i] = (low[i] >> g % 4 / 2 * 4 & 15) | (upper[i] >> g % 4 * 2 & 3) << 4;
            Integers::put(block + HEAD + g * Integers::BYTES, lane, q);
        }
    }
};

// Calls work(F{}) for the format of that number.
template <typename Work>
inline void with_format(int format, Work work) {
    switch (format) {
        case Q8_0: return work(FormatQ8_0{});
        case Q4_0: return work(FormatQ4_0{});
        case Q4_1: return work(FormatQ4_1{});
        case Q5_0: return work(FormatQ5_0{});
        case Q5_1: return work(FormatQ5_1{});
        case Q4_K: return work(FormatQ4_K{});
        case Q5_K: return work(FormatQ5_K{});
        case Q6_K: return work(FormatQ6_K{});
    }
}

inline int64_t panel_bytes(int format, int dim) {
    int64_t bytes = 0;
    with_format(format, [&](auto f) { bytes = static_cast<int64_t>(dim) / (GROUP * f.GROUPS) * f.BYTES; });
    return bytes;
}

template <typename F>
inline Vec minimum_of(const uint8_t* block, int group) {
    if constexpr (F::MINIMUM) return F::minimum(block, group);
    return splat(0.0f);
}

// ── products ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────

// The sums of ROWS rows for PANELS neighbouring panels.
template <typename F, int ROWS, int PANELS>
struct Sums {
    static constexpr int HALVES = F::SPLIT ? 2 : 1;
    Vec sums[ROWS][PANELS];

    // Adds the products of one group. Rows are `groups` apart, panels `stride`.
    inline __attribute__((always_inline)) void add(const uint8_t* block, int64_t stride, int group, const Group* x,
                                                   int64_t groups) {
        IVec acc[ROWS][PANELS][HALVES];
        for (int r = 0; r < ROWS; r++)
            for (int h = 0; h < HALVES; h++) {
                const int32_t* halves = x[r * groups].halves;
                const IVec begin = splat_int(F::ZERO ? -F::ZERO * (F::SPLIT ? halves[h] : halves[0] + halves[1]) : 0);
                for (int p = 0; p < PANELS; p++) acc[r][p][h] = begin;
            }
        const uint8_t* integers = F::integers(block, group);
#define BATON_STEP(STEP)                                                                                        \
    {                                                                                                           \
        Bytes w[PANELS];                                                                                        \
        for (int p = 0; p < PANELS; p++) w[p] = F::Integers::template take<STEP>(integers + p * stride);        \
        constexpr int half = F::SPLIT ? STEP / 4 : 0;                                                           \
        for (int r = 0; r < ROWS; r++)                                                                          \
            for (int p = 0; p < PANELS; p++)                                                                    \
                acc[r][p][half] = dot4<F::WIDE>(acc[r][p][half], w[p], x[r * groups].q + 4 * STEP);             \
    }
        BATON_STEP(0) BATON_STEP(4) BATON_STEP(1) BATON_STEP(5) BATON_STEP(2) BATON_STEP(6) BATON_STEP(3) BATON_STEP(7)
#undef BATON_STEP
        for (int p = 0; p < PANELS; p++) {
            const uint8_t* at = block + p * stride;
            const Vec scale = F::scale(at, group), minimum = minimum_of<F>(at, group);
            for (int r = 0; r < ROWS; r++) {
                IVec whole = acc[r][p][0];
                if constexpr (F::SPLIT)
                    whole = whole * F::half_scale(at, group, 0) + acc[r][p][1] * F::half_scale(at, group, 1);
                const Vec scaled = __builtin_convertvector(whole, Vec) * scale;
                sums[r][p] = fused(scaled, broadcast(x[r * groups].scale), sums[r][p]);
                if (F::MINIMUM) sums[r][p] = fused(minimum, broadcast(x[r * groups].sum), sums[r][p]);
            }
        }
    }
};

constexpr int64_t NEAR = 32 * 1024;  // bytes that stay in the first cache until they are used

// Ask for BYTES ahead of use: panels are too short for the hardware to guess what follows. Inlined, or gcc takes the call for
// one without effects and drops it.
template <int BYTES>
inline __attribute__((always_inline)) void fetch_block(const uint8_t* from, bool is_near) {
    if (is_near)
        for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(from + i, 0, 3);
    else
        for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// `ahead`: the distance of the bytes that are asked for meanwhile; 0: none.
template <typename F, int ROWS, int PANELS>
inline void panel_rows(const uint8_t* panel, int64_t stride, const Group* x, int64_t groups, float* out, int out_stride,
                       int64_t ahead) {
    Sums<F, ROWS, PANELS> all;
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) all.sums[r][p] = splat(0.0f);
    for (int64_t at = 0; at < groups; at += F::GROUPS, panel += F::BYTES) {
        if (ahead)
            for (int p = 0; p < PANELS; p++) fetch_block<F::BYTES>(panel + ahead + p * stride, ahead <= NEAR);
        for (int g = 0; g < F::GROUPS; g++) all.add(panel, stride, g, x + at + g, groups);
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) store(out + static_cast<int64_t>(r) * out_stride + p * LANES, all.sums[r][p]);
}

// out[r] = x[r] · PANELS panels
template <typename F, int PANELS>
void panel_product(const uint8_t* panel, int64_t stride, const Group* x, int rows, int64_t groups, float* out,
                   int out_stride) {
    constexpr int MOST = F::SPLIT && ROWS_MAX > 3 ? 3 : ROWS_MAX;
    int r = 0;
#define BATON_ROWS(ROWS)                                                                                            \
    panel_rows<F, ROWS, PANELS>(panel, stride, x + r * groups, groups, out + static_cast<int64_t>(r) * out_stride, \
                                out_stride, r ? 0 : PANELS * stride)
    for (; r + MOST <= rows; r += MOST) BATON_ROWS(MOST);
    if constexpr (MOST > 4)
        if (r + 4 <= rows) { BATON_ROWS(4); r += 4; }
    if (r + 2 <= rows) { BATON_ROWS(2); r += 2; }
    if (r < rows) BATON_ROWS(1);
#undef BATON_ROWS
}

// The 32 values x at once, which are read through `at(i)` in vectors.
inline void quantise_group(Vec low, Vec high, Group* to) {
    const Vec sizes = greater(greater(low, -low), greater(high, -high));
    const float peak = largest(sizes), inverse = peak > 0.0f ? 127.0f / peak : 0.0f;
    const Vec rounder = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to whole numbers, ties to even
    const Vec first = fused(low, splat(inverse), rounder) - rounder, second = fused(high, splat(inverse), rounder) - rounder;
    *reinterpret_cast<SignedQuarterBytes*>(to->q) = __builtin_convertvector(
        __builtin_convertvector(first, IVec), SignedQuarterBytes);
    *reinterpret_cast<SignedQuarterBytes*>(to->q + 16) = __builtin_convertvector(
        __builtin_convertvector(second, IVec), SignedQuarterBytes);
    to->halves[0] = static_cast<int32_t>(sum(first));
    to->halves[1] = static_cast<int32_t>(sum(second));
    to->scale = peak / 127.0f;
    to->sum = to->scale * static_cast<float>(to->halves[0] + to->halves[1]);
}

template <typename T>
inline void quantise(const typename T::Element* x, int dim, Group* to) {
    for (int d = 0; d < dim; d += GROUP) quantise_group(T::load16(x + d), T::load16(x + d + LANES), to + d / GROUP);
}

// ── weights one by one ───────────────────────────────────────────────────────────────────────────────────────────────────────

// The values of one group of one lane.
template <typename F>
inline void lane_values(const uint8_t* block, int group, int lane, float* out) {
    const uint8_t* integers = F::integers(block, group);
    const float scale = F::scale(block, group)[lane], minimum = minimum_of<F>(block, group)[lane];
#define BATON_STEP(STEP)                                                                                   \
    {                                                                                                      \
        const Bytes w = F::Integers::template take<STEP>(integers);                                        \
        float by = scale;                                                                                  \
        if constexpr (F::SPLIT) by *= static_cast<float>(F::half_scale(block, group, STEP / 4)[lane]);     \
        for (int j = 0; j < 4; j++)                                                                        \
            out[STEP * 4 + j] = by * static_cast<float>(static_cast<int>(w[lane * 4 + j]) - F::ZERO) + minimum; \
    }
    BATON_STEP(0) BATON_STEP(1) BATON_STEP(2) BATON_STEP(3) BATON_STEP(4) BATON_STEP(5) BATON_STEP(6) BATON_STEP(7)
#undef BATON_STEP
}

// out[r] = the weights of output rows[r]
template <typename T>
void lookup_team(const uint8_t* panels, int format, const int64_t* rows, int count, int dim, void* out_) {
    typedef typename T::Element Element;
    Element* out = static_cast<Element*>(out_);
    const int64_t stride = panel_bytes(format, dim);
#pragma omp for schedule(static)
    for (int r = 0; r < count; r++)
        with_format(format, [&](auto f) {
            const uint8_t* panel = panels + rows[r] / LANES * stride;
            float values[GROUP];
            for (int g = 0; g < dim / GROUP; g++) {
                lane_values<decltype(f)>(panel + static_cast<int64_t>(g / f.GROUPS) * f.BYTES, g % f.GROUPS,
                                         static_cast<int>(rows[r] % LANES), values);
                for (int i = 0; i < GROUP; i += LANES)
                    T::store16(out + static_cast<int64_t>(r) * dim + g * GROUP + i, load(values + i));
            }
        });
}

// The nearest float16, ties to even; beyond its range the largest.
inline uint16_t half_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    const float size = std::fabs(x);
    if (!(size < 65520.0f)) return sign | 0x7bff;
    if (size < 6.103515625e-5f) return sign | static_cast<uint16_t>(std::nearbyint(size * 16777216.0f));
    bits &= 0x7fffffffu;
    return sign | static_cast<uint16_t>((bits + 0xfffu + (bits >> 13 & 1)) >> 13) - (112 << 10);
}

// A block of a file from 32 floats: the largest becomes 127.
inline void encode_q8_0(const float* x, uint8_t* to) {
    float peak = 0.0f;
    for (int i = 0; i < GROUP; i++) peak = std::max(peak, std::fabs(x[i]));
    const uint16_t scale = half_bits(peak / 127.0f);
    const float inverse = peak > 0.0f ? 127.0f / peak : 0.0f;
    std::memcpy(to, &scale, 2);
    for (int i = 0; i < GROUP; i++) to[2 + i] = static_cast<uint8_t>(static_cast<int>(std::nearbyint(x[i] * inverse)));
}

// The least becomes 0, the largest 15.
inline void encode_q4_1(const float* x, uint8_t* to) {
    const float low = *std::min_element(x, x + GROUP), high = *std::max_element(x, x + GROUP);
    const float span = high - low, inverse = span > 0.0f ? 15.0f / span : 0.0f;
    const uint16_t head[2] = {half_bits(span / 15.0f), half_bits(low)};
    std::memcpy(to, head, 4);
    for (int i = 0; i < GROUP / 2; i++) {
        const int below = static_cast<int>(std::nearbyint((x[i] - low) * inverse));
        const int above = static_cast<int>(std::nearbyint((x[i + GROUP / 2] - low) * inverse));
        to[4 + i] = static_cast<uint8_t>(below | above << 4);
    }
}

// Panels of Q8_0 or Q4_1 from rows of floats.
template <typename T>
void encode_team(int format, const void* rows_, int outputs, int dim, uint8_t* out) {
    const typename T::Element* rows = static_cast<const typename T::Element*>(rows_);
    const int64_t stride = panel_bytes(format, dim);
    const int panels = (outputs + LANES - 1) / LANES;
#pragma omp for schedule(static)
    for (int p = 0; p < panels; p++) {
        std::memset(out + p * stride, 0, stride);
        for (int lane = 0; lane < LANES && p * LANES + lane < outputs; lane++)
            for (int d = 0; d < dim; d += GROUP) {
                const typename T::Element* from = rows + static_cast<int64_t>(p * LANES + lane) * dim + d;
                float x[GROUP];
                uint8_t block[FormatQ8_0::FILE_BYTES];
                for (int i = 0; i < GROUP; i++) x[i] = T::wide(from[i]);
                uint8_t* panel = out + p * stride;
                if (format == Q8_0) {
                    encode_q8_0(x, block);
                    FormatQ8_0::pack(block, panel + d / GROUP * FormatQ8_0::BYTES, lane);
                } else {
                    encode_q4_1(x, block);
                    FormatQ4_1::pack(block, panel + d / GROUP * FormatQ4_1::BYTES, lane);
                }
            }
    }
}

// Panels from rows as they lie in a file. order: the row for each output; a panel's missing rows are zeros.
inline void pack_team(int format, const uint8_t* rows, const int64_t* order, int outputs, int dim, uint8_t* out) {
    const int64_t stride = panel_bytes(format, dim);
    const int panels = (outputs + LANES - 1) / LANES;
#pragma omp for schedule(static)
    for (int p = 0; p < panels; p++) {
        uint8_t* panel = out + p * stride;
        std::memset(panel, 0, stride);
        with_format(format, [&](auto f) {
            const int blocks = dim / (GROUP * f.GROUPS);
            for (int lane = 0; lane < LANES && p * LANES + lane < outputs; lane++) {
                const uint8_t* row = rows + order[p * LANES + lane] * blocks * f.FILE_BYTES;
                for (int b = 0; b < blocks; b++)
                    f.pack(row + b * f.FILE_BYTES, panel + static_cast<int64_t>(b) * f.BYTES, lane);
            }
        });
    }
}

}  // namespace
