//! `stockade image`: the store of images of this user.
//!
//! A companion takes this process's place, which alone links decompressors. Through sudo it is
//! refused: root's images are the administrator's to choose.

use std::{
    convert::Infallible,
    ffi::{OsStr, OsString},
};

use anyhow::bail;
use stockade_engine::caller;

use crate::{args::Image, companion};

const COMPANION: &str = "stockade-image";

/// Becomes the companion.
///
/// # Errors
/// The companion cannot be started, or the caller may not change root's store.
pub(crate) fn run(command: &Image) -> anyhow::Result<Infallible> {
    if caller::identify(None)?.on_behalf {
        let remedy = caller::sudo_remedy().unwrap_or_default();
        bail!("root's images are the administrator's; leave sudo out for images of your own; {remedy}");
    }
    companion::become_companion(COMPANION, true, arguments(command))
}

fn arguments(command: &Image) -> Vec<OsString> {
    let mut words = Vec::new();
    match command {
        Image::Import { from, name, reference, platform, max_size } => {
            words.extend(["import".into(), from.into()]);
            let options = [("--name", name), ("--ref", reference), ("--platform", platform)];
            for (option, value) in options.into_iter().filter_map(|(option, value)| Some((option, value.as_ref()?))) {
                words.extend([option.into(), value.into()]);
            }
            words.extend(max_size.iter().flat_map(|bytes| ["--max-size".into(), bytes.to_string().into()]));
        }
        Image::Pull { reference, name, platform, max_size, creds_file, ca, insecure_http, auth_host } => {
            words.extend(["pull".into(), reference.into()]);
            let mut option = |name: &str, value: &OsStr| words.extend([name.into(), value.into()]);
            name.iter().for_each(|name| option("--name", name.as_ref()));
            platform.iter().for_each(|platform| option("--platform", platform.as_ref()));
            max_size.iter().for_each(|bytes| option("--max-size", bytes.to_string().as_ref()));
            creds_file.iter().for_each(|file| option("--creds-file", file.as_ref()));
            ca.iter().for_each(|file| option("--ca", file.as_ref()));
            insecure_http.iter().for_each(|host| option("--insecure-http", host.as_ref()));
            auth_host.iter().for_each(|host| option("--auth-host", host.as_ref()));
        }
        Image::Ls { json } => {
            words.push("ls".into());
            words.extend(json.then(|| "--json".into()));
        }
        Image::Inspect { image } => words.extend(["inspect".into(), image.into()]),
        Image::Verify { images } => words.extend(std::iter::once("verify".into()).chain(images.iter().map(OsString::from))),
        Image::Rm { images } => words.extend(std::iter::once("rm".into()).chain(images.iter().map(OsString::from))),
        Image::Gc => words.push("gc".into()),
    }
    words
}
