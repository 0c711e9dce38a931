// The first and only process of a machine that qemu-system makes up: 4 NUMA nodes, two hyperthreads of one core on each.
// Checks with the real sysfs, mbind, move_pages and getcpu that threads and weights are where they are meant to be.

#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "kernels/ops.h"
#include "shadow/copier.h"
#include "weights.h"

using namespace umbra;

namespace {

constexpr int kNodes = 4;
bool passed = true;

void check(bool ok, const char* what, int node = -1) {
    std::printf("%s: %s", ok ? "ok" : "FAIL", what);
    if (node >= 0) std::printf(", node %d", node);
    std::puts("");
    std::fflush(stdout);
    passed = passed && ok;
}

bool all_on(int memory, uintptr_t address, int64_t bytes) {
    std::vector<void*> pages;
    for (int64_t i = 0; i < bytes; i += 4096) pages.push_back(reinterpret_cast<void*>(address + i));
    std::vector<int> status(pages.size(), -1);
    if (syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, status.data(), 0) != 0) return false;
    for (const int node : status)
        if (node != memory) return false;
    return true;
}

void run() {
    const auto nodes = read_nodes("/sys/devices/system", allowed_cpus());
    check(nodes.size() == kNodes, "four nodes in sysfs");
    if (nodes.size() != kNodes) return;
    for (int n = 0; n < kNodes; n++)
        check(nodes[n].memory == n && nodes[n].cores == std::vector<std::vector<int>>{{2 * n, 2 * n + 1}},
              "one core of two hyperthreads", n);
    const auto teams = plan(nodes, 7);
    check(teams.size() == kNodes && teams[0].threads == 2 && teams[3].threads == 1, "7 threads are 2, 2, 2 and 1");

    Pool pool(teams);
    std::vector<int> here(4 * kNodes, -1);
    pool.on_nodes([](int) { return 4; },
                  [&](int n, int begin, int end, int) {
                      usleep(20000);  // long enough for every thread to get a chunk
                      unsigned cpu, node;
                      if (syscall(SYS_getcpu, &cpu, &node, nullptr) == 0)
                          std::fill(&here[4 * n + begin], &here[4 * n] + end, static_cast<int>(node));
                  });
    for (int n = 0; n < kNodes; n++) {
        bool ok = true;
        for (int i = 0; i < 4; i++) ok = ok && here[4 * n + i] == n;
        check(ok, "its threads run on it", n);
    }

    constexpr int64_t kBytes = 5 << 20;
    for (int n = 0; n < kNodes; n++) {
        Buffer bound(kBytes, n);
        std::memset(reinterpret_cast<void*>(bound.address()), 1, kBytes);  // by this thread, which is on node 0
        check(bound.bound() && all_on(n, bound.address(), kBytes), "mbind: every page", n);
        Buffer touched(kBytes);
        touched.touch(pool, n);
        check(!touched.bound() && all_on(n, touched.address(), kBytes), "first touch: every page", n);
    }
    check(!Buffer(1, kNodes).bound(), "a node that is not there is refused");

    // A second pool, made by a thread that the first one keeps on node 0.
    const auto [device, shadow] = divide(nodes, 2, 2);
    check(device.size() == 2 && device[0].memory == 2 && device[1].memory == 3, "the device keeps nodes 2 and 3");
    check(shadow.size() == 2 && shadow[0].memory == 0 && shadow[1].memory == 1, "the shadow pool has nodes 0 and 1");
    std::thread([&] {
        Pool first(device), second(shadow);
        std::vector<int> at(2, -1);
        second.on_nodes([](int) { return 1; },
                        [&](int n, int, int, int) {
                            unsigned cpu, node;
                            if (syscall(SYS_getcpu, &cpu, &node, nullptr) == 0) at[n] = static_cast<int>(node);
                        });
        check(at == std::vector<int>{0, 1}, "its threads run there");
    }).join();
    // A region of the shadow store where mbind is refused: touched by threads of the team.
    for (const Team& team : shadow) {
        Buffer region(kBytes);
        {
            Pool its({team});
            region.touch(its, 0);
        }
        check(all_on(team.memory, region.address(), kBytes), "first touch by its own threads", team.memory);
    }
    // A copier's thread writes where it runs: pages of a slot nobody touched before.
    for (int n = 0; n < kNodes; n++) {
        Copier copier(nodes[n].cores[0]);
        const std::vector<char> from(kBytes, 1);
        Buffer slot(kBytes);
        copier.wait(copier.submit(reinterpret_cast<void*>(slot.address()), from.data(),
                                  {{kBytes / 2, 0, kBytes / 2}, {0, kBytes / 2, kBytes / 2}}));
        check(all_on(n, slot.address(), kBytes), "a copier's thread is on its CPUs", n);
    }

    constexpr int kRowsOf = 400, kColumns = 256, kTokens = 3;
    const Weights split(pool, teams, 3, kRowsOf, kColumns);
    for (int n = 0; n < kNodes; n++)
        check(split.bytes[n] > 0 && all_on(n, split.buffers[n]->address(), split.bytes[n]), "its part of a matrix", n);
    Pool alone(1);
    const Weights whole(alone, {Team{}}, 3, kRowsOf, kColumns);
    std::vector<float> x(kTokens * kColumns), y(kTokens * kRowsOf), z(y.size());
    for (size_t i = 0; i < x.size(); i++) x[i] = pseudo_random(static_cast<int64_t>(i));
    std::vector<uint8_t> scratch(Scratch::bytes(kTokens, kColumns));
    Context on_four{pool, kernels_generic()}, on_one{alone, kernels_generic()};
    Linear{split.matrix, x.data(), nullptr, y.data(), Scratch{scratch.data()}, kTokens, kRowsOf}.run(on_four);
    Linear{whole.matrix, x.data(), nullptr, z.data(), Scratch{scratch.data()}, kTokens, kRowsOf}.run(on_one);
    check(y == z && y[0] != 0, "a product over four nodes is that over one");
}

}  // namespace

int main() {
    mkdir("/sys", 0755);
    mount("sysfs", "/sys", "sysfs", 0, nullptr);
    run();
    std::printf("RESULT %s\n", passed ? "PASS" : "FAIL");
    std::fflush(stdout);
    sync();
    reboot(RB_POWER_OFF);
}
