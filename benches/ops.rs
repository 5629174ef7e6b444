//! Times each operation of `autodidact::ops` against burn's own operations and PyTorch's, forward and backward, on one thread.
//!
//!     cargo bench --profile dev --bench ops -- [--python PYTHON] [--quick] [FILTER]
//!
//! PYTHON is an interpreter with torch; without it only burn is compared with. Prints milliseconds (median; on Linux the thread's CPU time, so that
//! a busy machine disturbs less) and GFLOP/s, then how many times longer burn and PyTorch take, forward and backward together. The first
//! `linear` is close to a bare matrix product, the machine's ceiling at the moment.
#![allow(clippy::print_stdout, clippy::doc_markdown, missing_docs)]

mod peer;

use std::process::Command;
use std::sync::Mutex;
use std::time::Instant;

use autodidact::ops;
use burn::tensor::{Device, Distribution, Tensor, activation, module, ops::ConvOptions};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

struct Bench {
    torch: Option<Mutex<peer::Peer>>,
    filter: String,
    repeats: usize,
    device: Device,
    start: Instant,
}

impl Bench {
    /// Milliseconds since some time ago.
    fn now(&self) -> f64 {
        std::thread::yield_now(); // brings the kernel's counter up to date
        let counter = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
        match counter.and_then(|text| text.split_whitespace().next()?.parse::<f64>().ok()) {
            Some(nanoseconds) => nanoseconds / 1e6,
            None => self.start.elapsed().as_secs_f64() * 1e3,
        }
    }

    fn random<const D: usize>(&self, shape: [usize; D], scale: f64) -> Tensor<D> {
        Tensor::random(shape, Distribution::Normal(0.0, scale), &self.device)
    }

    /// Median milliseconds of forward and backward, gradients of all leaves.
    fn time<const D: usize>(&self, run: &dyn Fn() -> Tensor<D>) -> (f64, f64) {
        let (mut forward, mut backward) = (Vec::new(), Vec::new());
        for i in 0..=self.repeats {
            let start = self.now();
            let y = run();
            let middle = self.now();
            let probe = y.clone().inner(); // any gradient but a constant
            let pull = |y: Tensor<D>| {
                let loss = (y * Tensor::from_inner(probe.clone())).sum();
                let start = self.now();
                drop(loss.backward());
                self.now() - start
            };
            let around = pull(y.clone().detach().require_grad()); // what the loss itself costs
            let whole = pull(y);
            if i > 0 {
                forward.push(middle - start);
                backward.push(whole - around);
            }
        }
        (peer::median(&forward), peer::median(&backward))
    }

    /// Compares two ways to the same result; `flop` is that of the forward pass (the backward pass has twice as many), `torch` what to ask the
    /// Python side.
    fn compare<const D: usize>(
        &self,
        name: &str,
        torch: &str,
        flop: f64,
        ours: &dyn Fn() -> Tensor<D>,
        burns: &dyn Fn() -> Tensor<D>,
    ) {
        if !name.contains(&self.filter) {
            return;
        }
        let (ours, burns) = (self.time(ours), self.time(burns));
        let rate = |(forward, backward): (f64, f64)| (flop / forward / 1e6, 2.0 * flop / backward / 1e6);
        let fast = rate(ours);
        let sum = |(forward, backward)| forward + backward;
        print!(
            "{name:34} ours {:8.2} {:8.2} ms {:6.1} {:6.1} GFLOP/s   burn {:8.2} {:8.2} ms  x{:.1}",
            ours.0,
            ours.1,
            fast.0,
            fast.1,
            burns.0,
            burns.1,
            sum(burns) / sum(ours)
        );
        if let Some(peer) = &self.torch {
            match peer.lock().expect("not poisoned").ask(&format!("{} {torch}", self.repeats)).as_deref() {
                Ok(&[forward, backward]) => {
                    print!("   torch {forward:8.2} {backward:8.2} ms  x{:.2}", (forward + backward) / sum(ours));
                }
                Ok(other) => print!("   torch said {other:?}"),
                Err(error) => print!("   {error}"),
            }
        }
        println!();
    }

    fn conv(&self, batch: usize, size: usize, [from, to]: [usize; 2], kernel: usize, stride: usize) {
        let x = self.random([batch, size, size, from], 1.0).require_grad();
        let w = self.random([to, from, kernel, kernel], 0.05).require_grad();
        let (stride, padding) = ([stride; 2], [kernel / 2; 2]);
        let out = (size - 1) / stride[0] + 1;
        let flop = (2 * batch * out * out * kernel * kernel * from * to) as f64;
        let name = format!("conv {kernel}x{kernel}/{} {size}px {from}->{to} b{batch}", stride[0]);
        let nchw = ops::to_nchw(x.clone().inner());
        let ours = || ops::conv2d_nhwc(x.clone(), w.clone(), None, stride, padding);
        let burns = || {
            let options = ConvOptions::new(stride, padding, [1, 1], 1);
            module::conv2d(Tensor::from_inner(nchw.clone()).require_grad(), w.clone(), None, options)
        };
        let torch = format!("conv {batch} {size} {from} {to} {kernel} {}", stride[0]);
        self.compare(&name, &torch, flop, &ours, &burns);
    }

    fn batch_norm(&self, batch: usize, size: usize, channels: usize, residual: bool) {
        let shape = [batch, size, size, channels];
        let x = self.random(shape, 1.0).require_grad();
        let extra = residual.then(|| self.random(shape, 1.0).require_grad());
        let (gamma, beta) = (self.random([channels], 1.0).require_grad(), self.random([channels], 1.0).require_grad());
        let name = format!("batch norm{} {size}px {channels} b{batch}", if residual { "+residual" } else { "" });
        let ours = || {
            let extra = extra.clone();
            ops::batch_norm_train(x.clone(), gamma.clone(), beta.clone(), 1e-5, extra, true).output
        };
        let nchw = ops::to_nchw(x.clone().inner());
        let extra_nchw = extra.clone().map(|extra| Tensor::from_inner(ops::to_nchw(extra.inner())).require_grad());
        let burns = || {
            let x = Tensor::from_inner(nchw.clone()).require_grad();
            let y = module::batch_norm_train(x, gamma.clone(), beta.clone(), 1e-5).output;
            activation::relu(match &extra_nchw {
                Some(extra) => y + extra.clone(),
                None => y,
            })
        };
        let torch = format!("batch_norm {batch} {size} {channels} {}", u8::from(residual));
        self.compare(&name, &torch, (8 * batch * size * size * channels) as f64, &ours, &burns);
    }

    fn max_pool(&self, batch: usize, size: usize, channels: usize) {
        let x = self.random([batch, size, size, channels], 1.0).require_grad();
        let nchw = ops::to_nchw(x.clone().inner());
        let nchw = nchw.mul_scalar(1.0); // a copy in this layout
        let ours = || ops::max_pool2d_nhwc(x.clone(), [3, 3], [2, 2], [1, 1]);
        let burns = || {
            let options = burn::tensor::ops::MaxPoolOptions::new([3, 3]).with_stride([2, 2]).with_padding([1, 1]);
            module::max_pool2d(Tensor::from_inner(nchw.clone()).require_grad(), options)
        };
        let name = format!("max pool 3x3/2 {size}px {channels} b{batch}");
        let torch = format!("max_pool {batch} {size} {channels}");
        self.compare(&name, &torch, (9 * batch * size * size * channels / 4) as f64, &ours, &burns);
    }

    fn linear(&self, rows: usize, ins: usize, outs: usize, kind: &str) {
        let x = self.random([rows, ins], 1.0).require_grad();
        let (w, b) = (self.random([outs, ins], 0.05).require_grad(), self.random([outs], 1.0).require_grad());
        let residual = self.random([rows, outs], 1.0).require_grad();
        let name = format!("linear{kind} {rows}x{ins}->{outs}");
        let ours = || match kind {
            "+residual" => ops::linear_residual(x.clone(), w.clone(), Some(b.clone()), residual.clone()),
            _ => ops::linear(x.clone(), w.clone(), Some(b.clone())),
        };
        let burns = || {
            let y = module::linear(x.clone(), w.clone().transpose(), Some(b.clone()));
            match kind {
                "+residual" => y + residual.clone(),
                _ => y,
            }
        };
        let torch = format!("linear{kind} {rows} {ins} {outs}");
        self.compare(&name, &torch, (2 * rows * ins * outs) as f64, &ours, &burns);
    }

    fn mlp(&self, rows: usize, dim: usize, hidden: usize) {
        let (x, residual) =
            (self.random([rows, dim], 1.0).require_grad(), self.random([rows, dim], 1.0).require_grad());
        let layer =
            |outs, ins| (self.random([outs, ins], 0.05).require_grad(), self.random([outs], 1.0).require_grad());
        let (first, second) = (layer(hidden, dim), layer(dim, hidden));
        let ours = || ops::mlp(x.clone(), first.clone(), second.clone(), Some(residual.clone()));
        let linear = |x: Tensor<2>, layer: &(Tensor<2>, Tensor<1>)| {
            module::linear(x, layer.0.clone().transpose(), Some(layer.1.clone()))
        };
        let burns = || linear(activation::gelu(linear(x.clone(), &first)), &second) + residual.clone();
        let name = format!("mlp+residual {rows}x{dim}->{hidden}");
        self.compare(&name, &format!("mlp {rows} {dim} {hidden}"), (4 * rows * dim * hidden) as f64, &ours, &burns);
    }

    fn layer_norm(&self, rows: usize, d: usize) {
        let x = self.random([rows, d], 1.0).require_grad();
        let (gamma, beta) = (self.random([d], 1.0).require_grad(), self.random([d], 1.0).require_grad());
        let ours = || ops::layer_norm(x.clone(), gamma.clone(), beta.clone(), 1e-6);
        let burns = || module::layer_norm(x.clone(), gamma.clone(), Some(beta.clone()), 1e-6);
        let torch = format!("layer_norm {rows} {d}");
        self.compare(&format!("layer norm {rows}x{d}"), &torch, (8 * rows * d) as f64, &ours, &burns);
    }

    fn attention(&self, batch: usize, tokens: usize, width: usize, heads: usize) {
        let qkv = self.random([batch, tokens, 3 * width], 1.0).require_grad();
        let ours = || ops::attention(qkv.clone(), heads);
        let burns = || {
            let part = |i: usize| {
                let part = qkv.clone().slice([0..batch, 0..tokens, i * width..(i + 1) * width]);
                part.reshape([batch, tokens, heads, width / heads]).swap_dims(1, 2)
            };
            let scores = part(0).matmul(part(1).swap_dims(2, 3)) / ((width / heads) as f64).sqrt();
            let out = activation::softmax(scores, 3).matmul(part(2));
            out.swap_dims(1, 2).reshape([batch, tokens, width])
        };
        let name = format!("attention b{batch} {tokens}x{width} h{heads}");
        let torch = format!("attention {batch} {tokens} {width} {heads}");
        self.compare(&name, &torch, (4 * batch * tokens * tokens * width) as f64, &ours, &burns);
    }
}

fn main() {
    ops::keep_pages();
    let mut arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let mut take = |flag: &str| arguments.iter().position(|argument| argument == flag).map(|at| arguments.remove(at));
    let quick = take("--quick").is_some();
    let python = arguments.iter().position(|argument| argument == "--python");
    let python =
        python.filter(|at| at + 1 < arguments.len()).map(|at| arguments.drain(at..at + 2).nth(1).expect("two"));
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/ops.py");
    let torch = python.map(|python| peer::Peer::start(Command::new(python).arg(script)).expect("PYTHON starts"));
    let bench = Bench {
        torch: torch.map(Mutex::new),
        filter: arguments.first().cloned().unwrap_or_default(),
        repeats: if quick { 3 } else { 9 },
        device: Device::flex().autodiff(),
        start: Instant::now(),
    };
    println!("instruction set {}; columns: forward, backward", ops::instruction_set());
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
    pool.install(|| {
        bench.conv(32, 32, [64, 64], 3, 1);
        bench.conv(32, 16, [128, 128], 3, 1);
        bench.conv(32, 8, [256, 256], 3, 1);
        bench.conv(32, 4, [512, 512], 3, 1);
        bench.conv(32, 32, [64, 128], 3, 2);
        bench.conv(32, 32, [3, 64], 3, 1);
        bench.conv(8, 56, [64, 256], 1, 1);
        bench.conv(4, 224, [3, 64], 7, 2);
        bench.batch_norm(32, 32, 64, false);
        bench.batch_norm(32, 32, 64, true);
        bench.batch_norm(32, 4, 512, true);
        bench.max_pool(4, 112, 64);
        bench.linear(1024, 1024, 1024, "");
        bench.linear(2080, 192, 576, "");
        bench.linear(2080, 192, 192, "+residual");
        bench.mlp(2080, 192, 768);
        bench.mlp(1576, 384, 1536);
        bench.layer_norm(2080, 192);
        bench.attention(32, 65, 192, 3);
        bench.attention(8, 197, 384, 6);
    });
}
