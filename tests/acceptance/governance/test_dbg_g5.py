import asyncio, os
from tests.acceptance.governance.test_overload_actions import Scene, scene, asking, pytest, pytestmark
from tests.acceptance.local import ask as plain
def cpu(pid):
    f=open(f"/proc/{pid}/stat").read().split(); return (int(f[13])+int(f[14]))/100
async def test_dbg(scene):
    await scene.use(action="queue", queue={"max_wait_s": 60}, saturation={"waiting": 1})
    pid=scene.local.workers()[0]
    loop=asyncio.get_running_loop()
    async with asking(scene.local.url, [scene.crowd("a", clients=120), scene.crowd("b", clients=12)]) as tally:
        last=cpu(pid); t0=loop.time()
        for k in range(12):
            t=loop.time()
            await asyncio.sleep(0.5)
            page = (await plain(scene.local.http, scene.local.stack.metrics_url, method="GET")).body.decode()
            now=cpu(pid)
            def m(n):
                return sum(float(l.split()[-1]) for l in page.splitlines() if l.startswith(n))
            live=[await e.live() for e in scene.local.engines]
            a=sum(o.crowd=="a" for o in tally.answers); b=sum(o.crowd=="b" for o in tally.answers)
            print(f"{loop.time()-t0:.1f} took {loop.time()-t:.2f} cpu {now-last:.2f} queue {m('warmpath_queue_requests'):.0f} granted {m('warmpath_queue_left_total'):.0f} left2 sat {m('warmpath_saturated_endpoints'):.0f} live {live} inflight {await scene.local.in_flight()} a {a} b {b} decided {m('warmpath_decisions_total')} fellback {m('warmpath_fallbacks_total')}")
            last=now
