// shadow/shadow.cpp in every order: a step's Join sees the rows of its own Submit, tables may be written between steps,
// and submitting, stopping, running out of time and the end of the pool fit together in any order.

#include "work.h"

using namespace umbra;

namespace {

constexpr double kSeconds = 1;

struct Step {
    Layer& layer;
    Context& context;
    int64_t hits = 0;
    Submit submit;
    Join join;

    Step(Layer& layer, Context& context, const std::shared_ptr<ShadowPool>& pool)
        : layer(layer), context(context),
          submit{pool, std::make_shared<ShadowWork>(layer.moe(), 0, &layer.step, nullptr), layer.counts.data(), &hits},
          join{pool,
               submit.work,
               {layer.rows.data(), layer.weights.data(), layer.ids.data(), layer.out.data(), 1, 2, 2, 0, 1},
               layer.times.data()} {}

    // Between steps tables and inputs are written; here what the step's work depends on.
    void begin(int64_t step, bool first_elsewhere) {
        layer.step = step;
        layer.x[0] = static_cast<float>(10 * step);
        layer.elsewhere[0] = first_elsewhere;
    }
    void check() {
        const float expected = static_cast<float>(10 * layer.step + (layer.elsewhere[0] ? 1 : 2));
        machine::demand(layer.out[0] == expected, "a step has the sums of its own work");
    }
};

std::shared_ptr<ShadowPool> made() {
    return std::make_shared<ShadowPool>(std::vector<Team>{{-1, 1, {}}}, no_kernels(), kSeconds);
}

void idle() { made(); }

void one_step() {
    Pool alone(1);
    Context context{alone, no_kernels()};
    Layer layer;
    Step step(layer, context, made());
    step.begin(1, true);
    step.submit.run(context), step.join.run(context);
    step.check();
    machine::settle();
}

// The rest begins where the pool sleeps for the first time, and ends where it sleeps again: its beginning and its end in
// all orders are in `idle`, `one_step` and `stopped`.
void steps() {
    Pool alone(1);
    Context context{alone, no_kernels()};
    Layer layer;
    Step step(layer, context, made());
    machine::settle();
    for (int64_t number = 1; number <= 2; number++) {
        step.begin(number, number % 2);
        step.submit.run(context), step.join.run(context);
        step.check();
    }
    machine::demand(layer.counts[0] == 2, "each step is counted once");
    machine::settle();
}

void interrupted() {  // a step that ends between Submit and Join; the next one waits for what it left behind
    Pool alone(1);
    Context context{alone, no_kernels()};
    Layer layer;
    Step step(layer, context, made());
    machine::settle();
    step.begin(1, false);
    step.submit.run(context);
    step.submit.pool->wait();  // as the next Submit does, before tables are written
    step.begin(2, true);
    step.submit.run(context), step.join.run(context);
    step.check();
    machine::settle();
}

// The outcome is 1 if the step gives its sums, 0 if it is an error.
void finish_or_fail(Step& step, Context& context) {
    try {
        step.submit.run(context), step.join.run(context);
        step.check();
        machine::outcome(1);
    } catch (const ShadowError& error) {
        machine::outcome(0);
    }
}

void stopped() {  // by another thread, at any time
    Pool alone(1);
    Context context{alone, no_kernels()};
    Layer layer;
    const std::shared_ptr<ShadowPool> pool = made();
    Step step(layer, context, pool);
    machine::settle();
    std::thread killer([&] { pool->stop(); });
    step.begin(1, false);
    finish_or_fail(step, context);
    killer.join();
}

// Waiting takes too long: an error, whatever the work does later; the layer lives as long as the work.
void late() {
    Pool alone(1);
    Context context{alone, no_kernels()};
    auto& layer = *new Layer;  // owned by the work, which may be abandoned with its thread
    Step step(layer, context, made());
    machine::settle();
    step.begin(1, false);
    finish_or_fail(step, context);
}

}  // namespace

int main(int count, char** arguments) {
    return machine::explore(count, arguments,
                            {{"a shadow pool that does nothing", idle},
                             {"one step", one_step},
                             {"steps", steps, 0, true},
                             {"an interrupted step", interrupted, 0, true},
                             {"stopped", stopped},
                             {"out of time", late, 1},
                             {"out of time twice", late, 2, true}});
}
