// AVX2 with VPDPBUSD (AVX-VNNI), which client CPUs without AVX-512 have. Products of float weights are as in avx2.cpp.

#define TARGET __attribute__((target("avx2,avxvnni,f16c,fma")))
#define VNNI true
#include "kernels/x86/dot.h"

namespace umbra {

const Kernels& kernels_avx_vnni() {
    static const Kernels kernels = [] {
        Kernels all = kernels_avx2();
        all.name = "avx_vnni";
        all.product[static_cast<int>(Format::q8)] = product_quantised<Format::q8>;
        all.product[static_cast<int>(Format::q4)] = product_quantised<Format::q4>;
        all.product[static_cast<int>(Format::mx4)] = product_quantised<Format::mx4>;
        all.product[static_cast<int>(Format::q4k)] = product_quantised<Format::q4k>;
        all.product[static_cast<int>(Format::q5k)] = product_quantised<Format::q5k>;
        all.product[static_cast<int>(Format::q6k)] = product_quantised<Format::q6k>;
        all.product[static_cast<int>(Format::iq4)] = product_quantised<Format::iq4>;
        all.product[static_cast<int>(Format::w8a8)] = product_quantised<Format::w8a8>;
        return all;
    }();
    return kernels;
}

}  // namespace umbra
