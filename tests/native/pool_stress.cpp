// Many short jobs on pools of several sizes, some after the workers have gone to sleep; built with ThreadSanitizer.

#include <unistd.h>

#include <cstdio>
#include <vector>

#include "../../ops/cpu/csrc/pool.h"

int main() {
    for (int threads : {1, 2, 3, 8}) {
        umbra::Pool pool(threads);
        std::vector<long> sums(37, 0), expected(37, 0);
        for (int round = 0; round < 3000; round++) {
            const int count = round % 37;
            pool.each(count, [&](int task, int) { sums[task] += round; });
            for (int i = 0; i < count; i++) expected[i] += round;
            if (sums != expected) {  // read by the caller, written by workers: the barrier is what makes this right
                std::printf("wrong sums in round %d with %d threads\n", round, threads);
                return 1;
            }
            if (round % 500 == 0) usleep(3000);
        }
    }
    std::puts("ok");
}
