//! Builds the pause program, which the daemon embeds.

#[path = "build/pause.rs"]
mod pause;

fn main() {
    pause::compile();
}
