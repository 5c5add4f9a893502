import faulthandler

faulthandler.dump_traceback_later(75, exit=True)
import subprocess
import time

import torch

from shoal.bench.config import RunConfig
from shoal.bench.experiments import cdsprites
from shoal.bench.run import prepare

print(torch.__version__, torch.cuda.get_device_name(), flush=True)
0 and print(
    subprocess.run(
        "which nvidia-cuda-mps-control; nvidia-smi | head -15", shell=True, capture_output=True, text=True
    ).stdout
)


def cfgs(kind, n):
    if kind == "sprites64":
        return cdsprites.configs([cdsprites.FISH], [10], range(n), passes=4000, per_domain=500, eval_limit=10)
    if kind == "sprites32":
        return cdsprites.configs(
            [cdsprites.FISH], [10], range(n), passes=4000, per_domain=500, eval_limit=10, size=32, width=24
        )
    if kind == "erm32":
        return cdsprites.configs(
            [cdsprites.ERM], [10], range(n), passes=4000, per_domain=500, eval_limit=10, size=32, width=24
        )
    if kind == "linear-mlp":
        return [
            RunConfig("linear", "fish", 4000, seed=i, batch_size=64, data_options={"per_domain": 2000})
            for i in range(n)
        ]


from dataclasses import replace

res = {}
for kind in ("sprites32", "erm32", "linear-mlp", "sprites64"):
    for T in (1, 5, 20):
        try:
            ts = [
                prepare(
                    replace(
                        c, data_options={**c.data_options, **({"seed": 0} if "prites" in c.dataset else {})}
                    ),
                    "cuda",
                    False,
                )
                for c in cfgs(kind, T)
            ]
            print("prepared", flush=True)
            ss = [torch.cuda.Stream() for _ in ts]
            gens = [t._captured() for t in ts]
            for t in ts:
                t.model.train()
            torch.cuda.synchronize()
            for g, s in zip(gens, ss):
                with torch.cuda.stream(s):
                    for _ in range(6):
                        next(g)
                torch.cuda.synchronize()
            print("captured all", flush=True)
            R = 40 if ts[0].unroll * ts[0].sampler.domains_per_step >= 5 else 200
            best = 1e9
            for rep in range(3):
                torch.cuda.synchronize()
                a = time.perf_counter()
                for r in range(R):
                    for g, s in zip(gens, ss):
                        with torch.cuda.stream(s):
                            next(g)
                torch.cuda.synchronize()
                best = min(best, time.perf_counter() - a)
            per = best / R / T / ts[0].unroll / ts[0].sampler.domains_per_step * 1e3
            res[kind, T] = per
            print(
                kind,
                T,
                "unroll",
                ts[0].unroll,
                "ms per pass per run",
                round(per, 4),
                "gain vs 1:",
                round(res[kind, 1] / per, 2),
                flush=True,
            )
            # python side cost
            torch.cuda.synchronize()
            a = time.perf_counter()
            for r in range(50):
                ts[0].sampler.plan(r)
            print("   plan ms/step", (time.perf_counter() - a) / 50 * 1e3)
            del ts, gens
        except Exception:
            import traceback

            traceback.print_exc()
            break
