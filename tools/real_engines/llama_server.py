"""llama.cpp's own HTTP server, as the package `xllamacpp` has it, until SIGTERM. Started by `engines`, in any Python.

    python llama_server.py MODEL.gguf PORT SLOTS CONTEXT N_BATCH N_UBATCH THREADS

CONTEXT is of all slots together, in equal parts. Prompts are not cached and nothing is moved or trimmed: each token
asked for is computed once.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# an extra, compiled and without types

import signal
import sys

import xllamacpp


def main(model: str, *numbers: str) -> None:
    port, slots, context, n_batch, n_ubatch, threads = map(int, numbers)
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel, params.n_ctx, params.kv_unified = slots, context, False
    params.n_batch, params.n_ubatch = n_batch, n_ubatch
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_threads_http = 2 * slots + 64  # one for each client that waits
    params.cont_batching, params.cache_prompt, params.ctx_shift = True, False, False
    params.cache_ram_mib = params.n_ctx_checkpoints = 0
    params.fit_params = False
    params.endpoint_metrics = params.endpoint_slots = True
    params.model_alias = {"tiny"}
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    server = xllamacpp.Server(params)
    print("listening", server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main(*sys.argv[1:])
