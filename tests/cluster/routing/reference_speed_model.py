"""Reference of the learned engine-speed model and the expected cost: the mathematics as it was derived and tested.

Compact on purpose and kept as it was; kvproxy.cluster.routing is held against it in
test_against_reference.py.
"""

# ruff: noqa
# fmt: off
# mypy: ignore-errors
import math
class SpeedModel:                       # one per router (model pool); N endpoints
    def __init__(s, P=8000.0, L=32000.0, t0=.010, decay=.995, ridge=.3, gain=.1, clip=3.0, half=120.0):
        s.sc=(t0, 1/P, 1/(P*L)); s.th=[1.0]*3; s.A=[[0.0]*3 for _ in range(3)]; s.b=[0.0]*3
        s.ep={}; s.decay=decay; s.ridge=ridge; s.gain=gain; s.clip=clip; s.half=half
    def base(s, x):                     # x=(requests, uncached tokens, sum u*(cached+u/2)); pooled seconds
        return sum(s.th[i]*s.sc[i]*x[i] for i in range(3))
    def factor(s, e, now):              # endpoint slowness; forgets towards the pool when it gets no samples
        lf,_,t=s.ep.get(e,(0.0,0,now)); return math.exp(lf*.5**((now-t)/s.half))
    def sample(s, e, x, y, now):        # y seconds of prefill-busy time did the work x on endpoint e
        if y<=0: return
        f=s.factor(e,now); z=[x[i]*s.sc[i] for i in range(3)]; th=s.th; p=sum(map(lambda a,b:a*b,th,z))
        yy=min(s.clip*p,max(p/s.clip,y/f)); w=1/(p*yy); A,b,d=s.A,s.b,s.decay
        for i in range(3):
            b[i]=d*b[i]+w*z[i]*yy
            for k in range(3): A[i][k]=d*A[i][k]+w*z[i]*z[k]
        g=sum(b)/sum(map(sum,A)); R=s.ridge/(g*g)                  # common scale the ridge pulls to
        for _ in range(3):
            for i in range(3):
                v=(b[i]+R*g-sum(A[i][k]*th[k] for k in range(3) if k!=i))/(A[i][i]+R); th[i]=min(20*g,max(g/20,v))
        n=s.ep.get(e,(0,0,0))[1]; r=math.log(max(1e-4,y)/s.base(x))-math.log(f)
        s.ep[e]=(max(-2.5,min(2.5,math.log(f)+max(s.gain,1/(n+6))*max(-1.0,min(1.0,r)))),n+1,now)
        m=.05*sum(v[0] for v in s.ep.values())/len(s.ep)
        for k,(l,c,t) in s.ep.items(): s.ep[k]=(l-m,c,t)
class Endpoint:                         # router-side ledger of requests without a first token
    def __init__(s): s.pend={}; s.F=[0.0]*3; s.anchor=0.0; s.acc=[0.0]*3; s.last=0.0; s.inflight=0
    def placed(s, rid, u, c, now):
        x=(1.0,u,u*(c+u*.5)); s.inflight+=1
        if not s.pend: s.anchor=s.last=now; s.acc=[0.0]*3; s.F=[0.0]*3
        s.pend[rid]=x
        for i in range(3): s.F[i]+=x[i]
    def first_token(s, rid, model, e, now):
        x=s.pend.pop(rid,None)
        if x is None: return
        if s.last>s.anchor and now-s.last>.002:                   # earlier group is complete: one sample
            model.sample(e,s.acc,s.last-s.anchor,now); s.anchor=s.last; s.acc=[0.0]*3
        for i in range(3): s.acc[i]+=x[i]; s.F[i]-=x[i]
        s.last=now
        if not s.pend: model.sample(e,s.acc,now-s.anchor,now); s.acc=[0.0]*3
    def cancelled(s, rid):              # client gone / failed before the first token: drop it and the open sample
        x=s.pend.pop(rid,None)
        if x:
            for i in range(3): s.F[i]-=x[i]
            s.acc=[0.0]*3; s.anchor=s.last                        # (caller: anchor=last=now)
    def wait(s, model, e, now):
        if not s.pend: return 0.0
        f=model.factor(e,now); g=[0.0]*3
        for x in s.pend.values():
            for i in range(3): g[i]+=x[i]
            if g[1]>=2048: break
        return max(0.0,f*model.base(s.F)-min(max(0.0,now-s.last),.95*f*model.base(g)))
def cost(model, ep, e, u, c, hot_missing, now, kappa=1.0, stall=.1, gamma=.25):
    b=model.base((1.0,u,u*(c+u*.5))); d=1-(1-gamma)*min(1.0,hot_missing/max(1,u))
    return ep.wait(model,e,now)+d*b*(model.factor(e,now)+kappa+stall*ep.inflight)
