// AVX2 with VPDPBUSD (AVX-VNNI), which client CPUs without AVX-512 have. Products of float weights are as in avx2.cpp.

#define TARGET __attribute__((target("avx2,avxvnni,f16c,fma")))
#define VNNI true
#include "kernels/x86/dot.h"

namespace umbra {

const Kernels& kernels_avx_vnni() {
    static const Kernels kernels = [] {
        Kernels all = kernels_avx2();
        all.name = "avx_vnni";
        each_format([&](auto format) {
            constexpr Format F = decltype(format)::value;
            if constexpr (kTraits<F>.records())
                all.put(F, product_of_records<product_quantised<kExpanded>>);
            else if constexpr (kTraits<F>.quantised())
                all.put(F, product_quantised<F>);
        });
        return all;
    }();
    return kernels;
}

}  // namespace umbra
