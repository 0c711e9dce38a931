// ik_llama.cpp for tools/benchmarks/ik_llama_engine.py, behind functions whose arguments do not change with its versions. It
// runs with its best settings for CPUs: weights repacked when loaded, huge pages, fused experts, flash attention.

#include <cstdint>
#include <string>

#include "llama.h"

namespace {

struct Engine {
    int threads = 1;
    llama_model* model = nullptr;
    llama_context* context = nullptr;
    llama_batch batch{};
    std::string error;
};

void keep_errors(ggml_log_level level, const char* text, void* engine) {
    if (level == GGML_LOG_LEVEL_ERROR) static_cast<Engine*>(engine)->error = text;
}

}  // namespace

extern "C" {

// Returns null and writes the reason to `why` (256 bytes) if it fails.
void* ik_open(const char* path, int threads, char* why) {
    auto* engine = new Engine;
    engine->threads = threads;
    llama_log_set(keep_errors, engine);
    llama_backend_init();
    llama_model_params model = llama_model_default_params();
    model.repack_tensors = true;
    model.use_thp = true;
    engine->model = llama_model_load_from_file(path, model);
    if (engine->model) return engine;
    why[engine->error.copy(why, 255)] = 0;
    delete engine;
    return nullptr;
}

// Room for `sequences` of `longest` tokens, of which a step computes up to `at_once`, in the default pieces of 512:
// larger ones are not faster. Forgets all sequences. Returns 0, or 1 if it fails.
int ik_reserve(void* engine, int sequences, int longest, int at_once) {
    auto* own = static_cast<Engine*>(engine);
    if (own->context) {
        llama_batch_free(own->batch);
        llama_free(own->context);
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = sequences * longest;
    params.n_seq_max = sequences;
    params.n_batch = at_once;
    params.n_threads = params.n_threads_batch = own->threads;
    params.flash_attn = true;
    params.fused_moe_up_gate = true;
    own->context = llama_init_from_model(own->model, params);
    if (own->context) own->batch = llama_batch_init(at_once, 0, 1);
    return !own->context;
}

int ik_vocabulary(void* engine) { return llama_n_vocab(static_cast<Engine*>(engine)->model); }

int ik_recurrent(void* engine) { return llama_model_has_recurrent(static_cast<Engine*>(engine)->model); }

void ik_clear(void* engine) { llama_kv_cache_clear(static_cast<Engine*>(engine)->context); }

void ik_remove(void* engine, int sequence, int from) {
    llama_kv_cache_seq_rm(static_cast<Engine*>(engine)->context, sequence, from, -1);
}

// One step of `count` tokens: (sequence, position, id, whether its logits are wanted) of each. Returns 0, or a status.
int ik_decode(void* engine, int count, const int32_t* tokens) {
    llama_batch& batch = static_cast<Engine*>(engine)->batch;
    batch.n_tokens = count;
    for (int i = 0; i < count; i++, tokens += 4) {
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = tokens[0];
        batch.pos[i] = tokens[1];
        batch.token[i] = tokens[2];
        batch.logits[i] = static_cast<int8_t>(tokens[3]);
    }
    return llama_decode(static_cast<Engine*>(engine)->context, batch);
}

// The logits of the last step that were wanted, one row after another.
const float* ik_logits(void* engine) { return llama_get_logits(static_cast<Engine*>(engine)->context); }

size_t ik_state_size(void* engine, int sequence) {
    return llama_state_seq_get_size(static_cast<Engine*>(engine)->context, sequence, 0);
}

void ik_state(void* engine, int sequence, uint8_t* state, size_t size) {
    llama_state_seq_get_data(static_cast<Engine*>(engine)->context, state, size, sequence, 0);
}

// Returns 0, or 1 if it fails.
int ik_restore(void* engine, int sequence, const uint8_t* state, size_t size) {
    return llama_state_seq_set_data(static_cast<Engine*>(engine)->context, state, size, sequence, 0) != size;
}

void ik_close(void* engine) {
    auto* own = static_cast<Engine*>(engine);
    if (own->context) {
        llama_batch_free(own->batch);
        llama_free(own->context);
    }
    llama_free_model(own->model);
    delete own;
}
}
