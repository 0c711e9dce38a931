#include "kernels/dispatch.h"

#include <stdexcept>

#if defined(__x86_64__)
#include "kernels/x86/tiles.h"
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace umbra {
namespace {

struct Set {
    const char* name;
    const char* needs;
    bool works;  // on this CPU
    const Kernels& (*kernels)();
};

// Every set of every architecture, so that a request for any of them gets a precise error; better sets come later.
std::vector<Set> all_sets() {
    std::vector<Set> sets{{"generic", "", true, kernels_generic},
                          {"avx2", "AVX2, FMA and F16C (x86-64)", false, nullptr},
                          {"avx_vnni", "AVX2, FMA, F16C and AVX-VNNI (x86-64)", false, nullptr},
                          {"avx512_vnni", "AVX-512 F, BW, DQ, VL and VNNI (x86-64)", false, nullptr},
                          {"avx512_bf16", "AVX-512 with VNNI and BF16 (x86-64)", false, nullptr},
                          {"amx", "AMX-TILE, AMX-INT8, AMX-BF16 and AVX512-BF16 (x86-64; Linux 5.16)", false, nullptr},
                          {"neon_dotprod", "dotprod (ARMv8.2)", false, nullptr},
                          {"neon_i8mm", "dotprod and i8mm (ARMv8.6)", false, nullptr}};
#if defined(__x86_64__)
    __builtin_cpu_init();
    sets[1].works = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    sets[1].kernels = kernels_avx2;
    sets[2].works = sets[1].works && __builtin_cpu_supports("avxvnni");
    sets[2].kernels = kernels_avx_vnni;
    sets[3].works = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    sets[3].kernels = kernels_avx512;
    sets[4].works = sets[3].works && __builtin_cpu_supports("avx512bf16");
    sets[4].kernels = kernels_avx512_bf16;
    sets[5].works = sets[4].works && tiles_work();
    sets[5].kernels = kernels_amx;
#elif defined(__aarch64__)
    sets[6].works = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
    sets[6].kernels = kernels_neon;
    sets[7].works = sets[6].works && getauxval(AT_HWCAP2) & HWCAP2_I8MM;
    sets[7].kernels = kernels_i8mm;
#endif
    return sets;
}

}  // namespace

std::vector<std::string> usable_sets() {
    std::vector<std::string> names;
    for (const Set& set : all_sets())
        if (set.works) names.emplace_back(set.name);
    return names;
}

const Kernels& choose_kernels(const std::string& name) {
    const std::string wanted = name == "auto" ? usable_sets().back() : name;
    std::string reason = "is not a set of kernels";
    for (const Set& set : all_sets()) {
        if (wanted != set.name) continue;
        if (set.works) return set.kernels();
        reason = std::string("needs ") + set.needs + ", which this CPU lacks";
    }
    std::string usable;
    for (const std::string& other : usable_sets()) usable += (usable.empty() ? "" : ", ") + other;
    throw std::invalid_argument("instruction_set: " + wanted + " " + reason + "; usable: " + usable);
}

}  // namespace umbra
