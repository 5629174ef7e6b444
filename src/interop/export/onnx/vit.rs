//! A vision transformer as nodes, with everything that `model::Vit` has.

use super::graph::Attribute::{Int, Ints};
use super::graph::{Graph, Value};
use super::layers::{Builder, Window, int};
use crate::model::{MlpKind, Pool, PositionEmbedding, Rotary, VitArch};

/// Returns the features of `[batch, channels, height, width]`, `[batch, dim]`.
pub(super) fn features(builder: &mut Builder<'_>, vit: &VitArch, [height, width]: [usize; 2]) -> Value {
    let patches = patches(builder, vit);
    let mut x = with_prefix(builder, vit, patches);
    if vit.pre_norm {
        x = builder.layer_norm("norm_pre", &x, vit.eps);
    }
    let grid = [height / vit.patch, width / vit.patch];
    let rotary = (vit.position == PositionEmbedding::Rope).then(|| {
        let half = vit.dim / vit.heads / 2;
        let (cos, sin) = Rotary::tables(vit.num_prefix(), grid, 2 * half, vit.rope_base);
        let shape = [vit.num_prefix() + grid[0] * grid[1], half];
        (builder.graph.weights("rope.cos", &shape, &cos), builder.graph.weights("rope.sin", &shape, &sin))
    });
    for index in 0..vit.depth {
        x = block(builder, vit, index, &x, rotary.as_ref());
    }
    if !vit.fc_norm {
        x = builder.layer_norm("norm", &x, vit.eps);
    }
    let x = pool(builder, vit, &x);
    if vit.fc_norm { builder.layer_norm("fc_norm", &x, vit.eps) } else { x }
}

/// The projection of each patch plus its position, `[batch, patches, dim]`.
fn patches(builder: &mut Builder<'_>, vit: &VitArch) -> Value {
    let at = "patch_embed";
    let x = builder.conv("patch_embed.proj", &Graph::images(), Window::tiles(vit.patch), 1);
    let x = builder.reshape(at, &x, &[0, int(vit.dim), -1]);
    let x = builder.transpose(at, &x, &[0, 2, 1]);
    if vit.position == PositionEmbedding::Rope {
        return x;
    }
    let (_, table) = builder.tensor("pos_embed");
    let own = vit.grid()[0] * vit.grid()[1];
    let table = builder.graph.weights("pos_embed", &[1, own, vit.dim], &table[table.len() - own * vit.dim..]);
    builder.add("pos_embed", &x, &table)
}

/// Puts class and register tokens in front, to which their positions are added here.
fn with_prefix(builder: &mut Builder<'_>, vit: &VitArch, patches: Value) -> Value {
    let prefix = vit.num_prefix();
    if prefix == 0 {
        return patches;
    }
    let at = "prefix_tokens";
    let tokens = ["cls_token", "reg_token"].into_iter().filter(|name| builder.has(name));
    let mut tokens: Vec<f32> = tokens.flat_map(|name| builder.tensor(name).1).copied().collect();
    if vit.prefix_positions && vit.position != PositionEmbedding::Rope {
        let (_, table) = builder.tensor("pos_embed");
        tokens.iter_mut().zip(table).for_each(|(token, position)| *token += position);
    }
    let tokens = builder.graph.weights(at, &[1, prefix, vit.dim], &tokens);
    // as many as there are images
    let batch = builder.graph.node(at, "Shape", &[&Graph::images()], &[("start", Int(0)), ("end", Int(1))]);
    let rest = builder.graph.list(&[int(prefix), int(vit.dim)]);
    let shape = builder.concat(at, &[&batch, &rest], 0);
    let tokens = builder.graph.node(at, "Expand", &[&tokens, &shape], &[]);
    builder.concat(at, &[&tokens, &patches], 1)
}

fn block(builder: &mut Builder<'_>, vit: &VitArch, index: usize, x: &Value, rotary: Option<&(Value, Value)>) -> Value {
    let at = |name: &str| format!("blocks.{index}.{name}");
    let scale = |name: &str| vit.layer_scale.map(|_| at(name));
    let y = builder.layer_norm(&at("norm1"), x, vit.eps);
    let y = attention(builder, vit, &at("attn"), &y, rotary);
    let y = builder.linear(&at("attn.proj"), &y, scale("ls1.gamma").as_deref());
    let x = builder.add(&at("attn"), x, &y);
    let y = builder.layer_norm(&at("norm2"), &x, vit.eps);
    let y = builder.linear(&at("mlp.fc1"), &y, None);
    let y = gate(builder, vit.mlp, &at("mlp"), &y);
    let y = builder.linear(&at("mlp.fc2"), &y, scale("ls2.gamma").as_deref());
    builder.add(&at("mlp"), &x, &y)
}

/// Attention before its last projection, `[batch, tokens, dim]`.
fn attention(builder: &mut Builder<'_>, vit: &VitArch, at: &str, x: &Value, rotary: Option<&(Value, Value)>) -> Value {
    let head = vit.dim / vit.heads;
    let packed = builder.linear(&format!("{at}.qkv"), x, None);
    let [query, key, value] = builder.split(at, &packed);
    // [batch, heads, tokens, head]
    let mut by_head = |x: &Value, norm: Option<&str>| {
        let x = builder.reshape(at, x, &[0, -1, int(vit.heads), int(head)]);
        let x = match norm {
            Some(norm) => builder.layer_norm(&format!("{at}.{norm}"), &x, vit.eps),
            None => x,
        };
        builder.transpose(at, &x, &[0, 2, 1, 3])
    };
    let norm = |name| vit.qk_norm.then_some(name);
    let (mut query, mut key) = (by_head(&query, norm("q_norm")), by_head(&key, norm("k_norm")));
    let value = by_head(&value, None);
    if let Some(rotary) = rotary {
        (query, key) = (turn(builder, at, &query, rotary), turn(builder, at, &key, rotary));
    }
    let scale = builder.graph.number((1.0 / (head as f64).sqrt()) as f32);
    let query = builder.mul(at, &query, &scale);
    let key = builder.transpose(at, &key, &[0, 1, 3, 2]);
    let scores = builder.graph.node(at, "MatMul", &[&query, &key], &[]);
    let shares = builder.graph.node(at, "Softmax", &[&scores], &[("axis", Int(-1))]);
    let y = builder.graph.node(at, "MatMul", &[&shares, &value], &[]);
    let y = builder.transpose(at, &y, &[0, 2, 1, 3]);
    builder.reshape(at, &y, &[0, -1, int(vit.dim)])
}

/// Turns value `i` of each query or key together with value `i + head / 2` (`model::Rotary`).
fn turn(builder: &mut Builder<'_>, at: &str, x: &Value, (cos, sin): &(Value, Value)) -> Value {
    let [a, b] = builder.split(at, x);
    let (a_cos, b_sin) = (builder.mul(at, &a, cos), builder.mul(at, &b, sin));
    let first = builder.graph.node(at, "Sub", &[&a_cos, &b_sin], &[]);
    let (b_cos, a_sin) = (builder.mul(at, &b, cos), builder.mul(at, &a, sin));
    let second = builder.add(at, &b_cos, &a_sin);
    builder.concat(at, &[&first, &second], -1)
}

/// What is between the two layers of an MLP.
fn gate(builder: &mut Builder<'_>, kind: MlpKind, at: &str, x: &Value) -> Value {
    if kind == MlpKind::Gelu {
        return builder.gelu(at, x);
    }
    let [gate, x] = builder.split(at, x);
    let gate = if kind == MlpKind::Geglu {
        builder.gelu(at, &gate)
    } else {
        let open = builder.graph.node(at, "Sigmoid", &[&gate], &[]);
        builder.mul(at, &gate, &open)
    };
    builder.mul(at, &gate, &x)
}

/// One vector an image, `[batch, dim]`.
fn pool(builder: &mut Builder<'_>, vit: &VitArch, x: &Value) -> Value {
    let at = "pool";
    match vit.pool {
        Pool::Class => {
            let first = builder.graph.integer(0);
            builder.graph.node(at, "Gather", &[x, &first], &[("axis", Int(1))])
        }
        Pool::Mean => {
            let x = if vit.num_prefix() == 0 {
                x.clone()
            } else {
                let (start, end, axis) = (
                    builder.graph.list(&[int(vit.num_prefix())]),
                    builder.graph.list(&[i64::MAX]),
                    builder.graph.list(&[1]),
                );
                builder.graph.node(at, "Slice", &[x, &start, &end, &axis], &[])
            };
            builder.graph.node(at, "ReduceMean", &[&x], &[("axes", Ints(vec![1])), ("keepdims", Int(0))])
        }
    }
}
