// shadow/copier.cpp in every order: a copy that is seen done is whole, its slot may then be published to a step's
// threads, and after `stop` nobody waits for ever.

#include "shadow/copier.h"

#include "machine.h"
#include "runtime/pool.h"
#include "shadow/shadow.h"

using namespace umbra;

namespace {

struct Slots {
    std::vector<char> store{1, 2}, slots{0, 0};
    std::vector<int> table{-1, -1};  // expert -> slot

    bool whole(int expert) const { return table[expert] < 0 || slots[table[expert]] == store[expert]; }
};

void polled() {  // a step after each look, as the engine does; the table is written between steps only
    Slots s;
    Copier copier;
    const uint64_t first = copier.submit(s.slots.data(), s.store.data(), {{0, 0, 1}});
    const uint64_t second = copier.submit(s.slots.data(), s.store.data(), {{1, 1, 1}});
    for (int step = 0; step < 2; step++) {
        if (copier.done(second)) {
            s.table[1] = 1;
            machine::demand(copier.done(first), "copies are finished in order");
        }
        if (copier.done(first)) s.table[0] = 0;
        machine::demand(s.whole(0) && s.whole(1), "a slot is published when it is whole");
    }
    machine::outcome((s.table[0] >= 0) + (s.table[1] >= 0));
}

void waited() {  // then read by the threads of the next step
    Slots s;
    Copier copier;
    copier.wait(copier.submit(s.slots.data(), s.store.data(), {{0, 0, 2}}));
    s.table = {0, 1};
    std::vector<char> seen(2);
    Pool pool(std::vector<Team>{{-1, 1, {}}, {-1, 1, {}}});
    pool.each(2, [&](int expert, int) { seen[expert] = s.slots[s.table[expert]]; });
    machine::demand(seen == s.store, "a step reads whole slots");
}

void polled_while_it_is_stopped() {  // what is said to be dropped is not copied
    Slots s;
    bool dropped = false;
    {
        Copier copier;
        const uint64_t ticket = copier.submit(s.slots.data(), s.store.data(), {{0, 0, 2}});
        std::thread killer([&] { copier.stop(); });
        try {
            copier.done(ticket);
        } catch (const ShadowError&) {
            dropped = true;
        }
        killer.join();
    }
    machine::demand(!dropped || s.slots[0] == 0, "a copy that is done is not said to be dropped");
    machine::outcome(dropped);
}

void stopped() {
    Slots s;
    Copier copier;
    std::thread killer([&] { copier.stop(); });
    int done = 0;
    try {
        const uint64_t ticket = copier.submit(s.slots.data(), s.store.data(), {{0, 0, 2}});
        copier.wait(ticket);
        done = 1;
        machine::demand(s.slots == s.store, "a copy that is done is whole");
    } catch (const ShadowError&) {
    }
    killer.join();
    machine::outcome(done);
}

}  // namespace

int main(int count, char** arguments) {
    return machine::explore(count, arguments,
                            {{"polled", polled},
                             {"waited", waited},
                             {"stopped", stopped},
                             {"polled while it is stopped", polled_while_it_is_stopped}});
}
