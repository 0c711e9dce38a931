#include "runtime/probe.h"

#include <atomic>

#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/x86/tiles.h"
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace umbra {
namespace {

constexpr int64_t kChunk = 1 << 15;  // words: 256 KB

// Twelve chains cover the latency of two units; the asm keeps each sum in its register and keeps the compiler from
// merging steps.
#define CHAINS(STEP) STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) STEP(8) STEP(9) STEP(10) STEP(11)

#if defined(__x86_64__)
#define MACS(NAME, TARGET, VECTOR, INSTRUCTION)                       \
    __attribute__((target(TARGET))) int64_t NAME(int64_t rounds) {    \
        typedef VECTOR Vector;                                        \
        const Vector a{}, b{};                                        \
        CHAINS(ZERO)                                                  \
        for (int64_t round = 0; round < rounds * 1000; round++) {     \
            CHAINS(INSTRUCTION)                                       \
        }                                                             \
        return rounds * 1000 * 12 * static_cast<int>(sizeof(Vector)); \
    }
#define ZERO(i) Vector s##i{};
#define DOT_512(i) asm volatile("vpdpbusd %2, %1, %0" : "+v"(s##i) : "v"(a), "v"(b));
#define DOT_256(i) asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(s##i) : "x"(a), "x"(b));
MACS(macs_avx512, "avx512f,avx512vnni", __m512i, DOT_512)
MACS(macs_avx_vnni, "avx2,avxvnni", __m256i, DOT_256)

// A product of tiles takes as long as some of those of vectors, so there are fewer.
int64_t macs_amx(int64_t rounds) {
    constexpr TileShapes kFull{1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    const Tiles configured(kFull);
    for (int64_t round = 0; round < rounds * 100; round++) {
        tile_dot_int8<0, 6, 7>();
        tile_dot_int8<1, 6, 7>();
        tile_dot_int8<2, 6, 7>();
        tile_dot_int8<3, 6, 7>();
        tile_dot_int8<4, 6, 7>();
        tile_dot_int8<5, 6, 7>();
    }
    return rounds * 100 * 6 * 16 * 16 * 64;
}

__attribute__((target("avx2"))) int64_t macs_avx2(int64_t rounds) {
    __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(1), ones = _mm256_set1_epi16(1), t;
#define STEP(i) __m256i s##i = _mm256_setzero_si256();
    CHAINS(STEP)
#undef STEP
    for (int64_t round = 0; round < rounds * 1000; round++) {
#define STEP(i)                                                                      \
    asm volatile("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0" \
                 : "+x"(s##i), "=&x"(t)                                              \
                 : "x"(a), "x"(b), "x"(ones));
        CHAINS(STEP)
#undef STEP
    }
    return rounds * 1000 * 12 * 32;
}
#elif defined(__aarch64__)
// SDOT does 16 multiply-adds an instruction, SMMLA 32.
#define MACS(NAME, TARGET, INSTRUCTION, EACH)                      \
    __attribute__((target(TARGET))) int64_t NAME(int64_t rounds) { \
        int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(1);            \
        asm volatile("" : "+w"(a), "+w"(b));                       \
        CHAINS(ZERO)                                               \
        for (int64_t round = 0; round < rounds * 1000; round++) {  \
            CHAINS(INSTRUCTION)                                    \
        }                                                          \
        return rounds * 1000 * 12 * EACH;                          \
    }
#define ZERO(i) int32x4_t s##i = vdupq_n_s32(0);
#define SDOT(i) asm volatile("sdot %0.4s, %1.16b, %2.16b" : "+w"(s##i) : "w"(a), "w"(b));
#define SMMLA(i) asm volatile("smmla %0.4s, %1.16b, %2.16b" : "+w"(s##i) : "w"(a), "w"(b));
MACS(macs_dotprod, "arch=armv8.2-a+dotprod", SDOT, 16)
MACS(macs_i8mm, "arch=armv8.2-a+i8mm", SMMLA, 32)
#endif

int64_t macs(int64_t rounds) {
#if defined(__x86_64__)
    if (tiles_work()) return macs_amx(rounds);
    if (__builtin_cpu_supports("avx512vnni")) return macs_avx512(rounds);
    if (__builtin_cpu_supports("avxvnni")) return macs_avx_vnni(rounds);
    if (__builtin_cpu_supports("avx2")) return macs_avx2(rounds);
#elif defined(__aarch64__)
    if (getauxval(AT_HWCAP2) & HWCAP2_I8MM) return macs_i8mm(rounds);
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) return macs_dotprod(rounds);
#endif
    int32_t sums[64] = {};
    volatile int8_t a = 3, b = 1;
    for (int64_t round = 0; round < rounds * 1000; round++) {
        const int32_t product = a * b;
        for (int i = 0; i < 64; i++) sums[i] += product;
    }
    volatile int32_t keep = sums[0];
    (void)keep;
    return rounds * 1000 * 64;
}

}  // namespace

ReadProbe::ReadProbe(Context& context, int64_t bytes) : memory_(bytes), count_(bytes / 8) {
    context.pool.each(static_cast<int>(count_ / kChunk), [&](int task, int) {
        for (int64_t i = task * kChunk; i < (task + 1) * kChunk; i++) words()[i] = i;
    });
}

uint64_t ReadProbe::run(Context& context) const {
    std::atomic<uint64_t> total{0};
    context.pool.each(static_cast<int>(count_ / kChunk), [&](int task, int) {
        const uint64_t* at = words() + task * kChunk;
        uint64_t sums[32] = {};
        for (int64_t i = 0; i < kChunk; i += 32) {
            __builtin_prefetch(at + i + 512);
            __builtin_prefetch(at + i + 520);
            __builtin_prefetch(at + i + 528);
            __builtin_prefetch(at + i + 536);
            for (int l = 0; l < 32; l++) sums[l] ^= at[i + l];
        }
        uint64_t sum = 0;
        for (int l = 0; l < 32; l++) sum ^= sums[l];
        total.fetch_xor(sum, std::memory_order_relaxed);
    });
    return total.load();
}

int64_t mac_probe(Context& context, int64_t rounds) {
    std::atomic<int64_t> total{0};
    context.pool.each(context.pool.threads(), [&](int, int) { total.fetch_add(macs(rounds)); });
    return total.load();
}

}  // namespace umbra
