"""A scenario of typed objects, run and read in Python. An editor completes all these names, and checks their types."""

import batchsim

workload = batchsim.Workload(
    batchsim.Poisson("8/s"),
    lengths=batchsim.Lengths(batchsim.Lognormal(mean=900, cv=1.0, max=8000), batchsim.Lognormal(mean=200, cv=0.8)),
    output_cap=1024,
    duration="90s",
    warmup="15s",
    drain="10s",
)
scenario = batchsim.Scenario(
    model="llama-3.1-8b",
    cost="h100",
    workload=workload,
    policies={
        "vllm": {"max_num_seqs": 64},
        "static": {"batch_size": 16, "max_wait": "500ms"},
    },
    slo="ttft<1s & tpot<50ms @ 99%",
    load=batchsim.Load(mean_rate=["4/s", "8/s"]),
    seeds=1,
    name="in_python",
)
results = batchsim.run(scenario)
print(results.summary[["policy", "load", "unstable", "ttft_p50_s", "ttft_p99_s", "in_slo"]].round(3))

requests = results.requests("vllm", load=8)
print(requests[["ttft_s", "tpot_s", "e2e_s"]].describe(percentiles=[0.5, 0.99]).round(4))

for miss in results.explain(policy="static", load=4, slo=True):
    print(miss["policy"], "misses", miss["missed"], "of", miss["offered"], miss["causes"][0]["cause"])

results.plot.p99_vs_qps().savefig("p99_vs_qps.png")
