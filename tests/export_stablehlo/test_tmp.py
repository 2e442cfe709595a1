import subprocess, sys, time
import numpy as np, jax
from nitro_export_stablehlo import load_bundle
from nitro_export_stablehlo._verify import verify_bundle
def test_cli(bundles):
    for args in (["verify",str(bundles["mlp"])],["verify",str(bundles["many"])],["inspect",str(bundles["many"])],["predict",str(bundles["many"])],["diff",str(bundles["mlp"]),str(bundles["many"])],["swap-weights",str(bundles["mlp"]),str(bundles["mlp"]/"weights.safetensors"),"--out",str(bundles["mlp"].parent/"mlp2")],["verify",str(bundles["mlp"].parent/"mlp2")],["diff",str(bundles["mlp"]),str(bundles["mlp"].parent/"mlp2")],["verify","/nonexistent"],["predict","/nonexistent"]):
        t=time.time()
        r=subprocess.run([sys.executable,"-m","nitro_export_stablehlo",*args],capture_output=True,text=True)
        print(args[0],r.returncode,time.time()-t,r.stdout,r.stderr)
def test_speed(bundles):
    b=load_bundle(bundles["mlp"]).warmup()
    x=np.zeros((1,16),np.uint8)
    p=b._programs.get(1); w=b._weight_args
    def t(f,n=3000):
        for _ in range(200): f()
        best=1e9
        for _ in range(5):
            s=time.perf_counter()
            for _ in range(n//5): f()
            best=min(best,(time.perf_counter()-s)/(n//5))
        return best*1e6
    xd=jax.device_put(x)
    print("bare np",t(lambda: np.asarray(p(x,*w)[0])),"bundle np",t(lambda: b(pixels=x)["logits"]))
    print("bare dev",t(lambda: np.asarray(p(xd,*w)[0])),"bundle dev",t(lambda: b(pixels=xd)["logits"]))
