//! Builds what the daemon embeds: the wire types and the pause program.

#[path = "build/pause.rs"]
mod pause;
#[path = "build/wire.rs"]
mod wire;

fn main() {
    wire::generate();
    pause::compile();
}
