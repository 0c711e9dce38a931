// Many short jobs on pools of several sizes and numbers of nodes, some after the workers have gone to sleep; built with
// ThreadSanitizer.

#include <unistd.h>

#include <cstdio>
#include <vector>

#include "runtime/pool.h"

int main() {
    using Teams = std::vector<umbra::Team>;
    for (const Teams& teams :
         {Teams{{-1, 1, {}}}, Teams{{-1, 2, {}}}, Teams{{-1, 8, {}}}, Teams{{-1, 2, {}}, {-1, 1, {}}},
          Teams{{-1, 1, {0}}, {-1, 2, {0}}, {-1, 1, {0}}, {-1, 1, {0}}}}) {
        umbra::Pool pool(teams);
        std::vector<long> sums(37, 0), expected(37, 0);
        for (int round = 0; round < 3000; round++) {
            const int count = round % 37;
            pool.each(count, [&](int task, int) { sums[task] += round; });
            for (int i = 0; i < count; i++) expected[i] += round;
            if (sums != expected) {  // read by the caller, written by workers: the barrier is what makes this right
                std::printf("wrong sums in round %d with %d threads\n", round, pool.threads());
                return 1;
            }
            if (round % 500 == 0) usleep(3000);
        }
        // Tasks of a node are done by its threads only, whichever nodes have any.
        for (int round = 0; round < 300; round++) {
            std::vector<int> by(5 * pool.nodes(), -1);
            pool.on_nodes([&](int n) { return (round + n) % 6; },
                          [&](int n, int begin, int end, int thread) {
                              for (int i = begin; i < end; i++) by[5 * n + i] = thread;
                          });
            for (int n = 0; n < pool.nodes(); n++)
                for (int i = 0; i < 5; i++) {
                    const bool mine = by[5 * n + i] >= pool.first(pool.threads(), n) &&
                                      by[5 * n + i] < pool.first(pool.threads(), n + 1);
                    if (mine != (i < (round + n) % 6)) return 1;
                }
        }
    }
    std::puts("ok");
}
