//! The images of a service's templates: made one at a time when a worker asks, and lent for some runs to
//! workers that have asked, and to no other: one that has nothing to run would keep every image that was made
//! meanwhile.
//!
//! An image is of one key, or of all keys of its policy where the policy says so, and no worker gets it
//! for another. All workers together get no more runs of it than the policy allows: those that a worker
//! was lent and has not used when it ends are lost. What is asked for is compared with the settings. An
//! image is made by another process, and whether it is what a fresh start is now is the workers' to see.

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use stockade_engine::{
    Options,
    caller::Caller,
    template::{Maker, Progress, TemplateImage},
};
use stockade_protocol::service::{FromSupervisor, Key, ReadyFor, TemplateLent, TemplateOf, TemplateRefused, TemplateWanted};

use super::{monotonic_ms, sealed_file};

/// The most runs that a worker is lent at a time: then it may get another image of the rotation.
const MAX_LENT: u64 = 32;
/// So many makers in a row that make none where the host may be to blame, and the template is refused.
const MAX_BROKEN: u32 = 3;
/// All images together that may still be lent have at most this part of the memory that runs share. Workers
/// keep what they were lent.
const PART_OF_MEMORY: u64 = 8;
/// For so long an image does not make room for one of another template. With more templates in use than there
/// is room for, each would otherwise be made anew for every run.
const HELD: Duration = Duration::from_secs(60);

/// A template that a policy of the service has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedTemplate {
    /// Its policy, as keys name it.
    pub policy: String,
    /// Its runtime.
    pub runtime: String,
    /// Its name.
    pub name: String,
    /// Runs from one image, of all workers together.
    pub max_runs: u64,
    /// The age at which another image is made.
    pub max_age: Duration,
    /// Images at a time.
    pub images: u32,
    /// All keys of the policy have its images in common.
    pub is_shared: bool,
    /// Workers that keep a copy waiting; of each key, unless it is shared.
    pub ready: u32,
}

/// What the workers that are to be ready from the beginning are ready for, each.
pub fn ready_workers(keys: &[Key], templates: &[ServedTemplate]) -> Vec<ReadyFor> {
    let of_template = |served: &ServedTemplate| {
        let users = keys.iter().filter(|key| key.policies.contains(&served.policy));
        let users: Vec<&Key> = users.take(if served.is_shared { 1 } else { usize::MAX }).collect();
        let one = |key: &&Key| ReadyFor { key: key.id.clone(), policy: served.policy.clone(), runtime: served.runtime.clone() };
        let all: Vec<ReadyFor> = (0..served.ready).flat_map(|_| users.iter().map(one)).collect();
        all
    };
    templates.iter().flat_map(of_template).collect()
}

/// A message for a worker, with the descriptors that come along.
pub(super) struct Reply {
    pub(super) worker: u32,
    pub(super) message: FromSupervisor,
    files: Option<(Arc<OwnedFd>, Arc<OwnedFd>)>,
}

impl Reply {
    /// The descriptors.
    pub(super) fn files(&self) -> Vec<BorrowedFd<'_>> {
        self.files.iter().flat_map(|(image, known)| [image.as_fd(), known.as_fd()]).collect()
    }
}

/// All images, and what is still to be made.
#[derive(Default)]
pub(super) struct TemplateStore {
    all: BTreeMap<TemplateOf, State>,
    queue: VecDeque<TemplateOf>,
    making: Option<(TemplateOf, Maker, Instant)>,
    /// The number of the last image.
    last: u64,
    /// Counts the uses.
    clock: u64,
}

#[derive(Default)]
struct State {
    /// The key for which the next is made: one that has asked, or may use the policy.
    key: String,
    images: Vec<StoredImage>,
    /// Why the last try failed, and when. There is no other for the template's `max_age`.
    refused: Option<(String, Instant)>,
    /// How many makers in a row have made none where another try may succeed.
    broken: u32,
    /// Workers that wait for the next.
    waiting: Vec<u32>,
    /// Bytes of the last image; 0 before there was one.
    size: u64,
    used: u64,
}

/// An image that is lent.
struct StoredImage {
    number: u64,
    image: TemplateImage,
    /// What is known of it, as JSON.
    known: Arc<OwnedFd>,
    since: Instant,
    runs_left: u64,
}

/// What the service has settled.
pub(super) struct SettingsView<'a> {
    pub(super) templates: &'a [ServedTemplate],
    pub(super) keys: &'a [Key],
    pub(super) workers: &'a [u32],
    /// Bytes that runs share.
    pub(super) memory: u64,
    /// Whose the runs are, where root serves.
    pub(super) account: Option<&'a Caller>,
    pub(super) tell: &'a dyn Fn(&str),
}

impl SettingsView<'_> {
    fn served(&self, of: &TemplateOf) -> Option<&ServedTemplate> {
        self.templates.iter().find(|served| (&served.policy, &served.runtime) == (&of.policy, &of.runtime))
    }

    /// A key for which an image of a template may be made, if there is one: this, where it may be.
    fn maker_key(&self, of: &TemplateOf, last: &str) -> Option<String> {
        let others = self.keys.iter().map(|key| key.id.as_str());
        let key = std::iter::once(last).chain(others).find(|key| self.granted(of, key).is_some());
        key.map(str::to_owned)
    }

    /// The template that a worker may ask for on behalf of this key.
    fn granted(&self, of: &TemplateOf, key: &str) -> Option<&ServedTemplate> {
        let served = self.served(of)?;
        let has_policy = self.keys.iter().any(|known| known.id == key && known.policies.contains(&of.policy));
        let is_its = of.key.as_deref() == (!served.is_shared).then_some(key);
        (has_policy && is_its).then_some(served)
    }
}

impl TemplateStore {
    /// What a worker has asked for, which it is lent now or later.
    pub(super) fn ask(&mut self, worker: u32, wanted: TemplateWanted, view: &SettingsView<'_>) -> Vec<Reply> {
        let TemplateWanted { of, key, unfit, has_one } = wanted;
        let Some(served) = view.granted(&of, &key) else {
            return vec![refusal(worker, &of, String::from("the service has no such template for this key"))];
        };
        self.clock += 1;
        let state = self.all.entry(of.clone()).or_default();
        (state.key, state.used) = (key, self.clock);
        state.images.retain(|kept| kept.runs_left > 0 && unfit.is_none_or(|unfit| kept.number > unfit));
        if state.refused.as_ref().is_some_and(|(_, since)| since.elapsed() >= served.max_age) {
            (state.refused, state.broken) = (None, 0);
        }
        if let Some((why, _)) = &state.refused {
            return vec![refusal(worker, &of, why.clone())];
        }
        let reply = state.lend(worker, &of, has_one, served, view);
        if reply.is_none() && !state.waiting.contains(&worker) {
            state.waiting.push(worker);
        }
        self.make_more(&of, served, view);
        let mut replies = self.make_next(view);
        replies.extend(reply);
        replies
    }

    /// What becomes readable when the process that makes an image has something to say.
    pub(super) fn maker(&self) -> Option<BorrowedFd<'_>> {
        self.making.as_ref().map(|(_, maker, _)| maker.answer())
    }

    /// Takes what that has made.
    pub(super) fn take_made(&mut self, view: &SettingsView<'_>) -> Vec<Reply> {
        let Some((of, maker, begun)) = self.making.take() else { return Vec::new() };
        let came = match maker.poll() {
            Progress::Going(maker) => {
                self.making = Some((of, maker, begun));
                return Vec::new();
            }
            Progress::Made(image) => self.keep(&of, image, begun, view),
            Progress::Broken(why) => match self.all.get_mut(&of) {
                Some(state) if state.broken + 1 < MAX_BROKEN => {
                    state.broken += 1;
                    self.queue.push_back(of.clone());
                    Ok(Vec::new())
                }
                _ => Err(why),
            },
            Progress::Refused(why) => Err(why),
        };
        let mut replies = came.unwrap_or_else(|why| self.refuse(&of, why, view));
        replies.extend(self.make_next(view));
        replies
    }

    /// Other settings hold. What was refused is tried again, and what no key may use goes.
    pub(super) fn reload(&mut self, view: &SettingsView<'_>) {
        self.all.retain(|of, state| {
            let key = view.maker_key(of, &state.key);
            (state.refused, state.broken) = (None, 0);
            key.map(|key| state.key = key).is_some()
        });
    }

    /// Has another image made where there are fewer good ones than the policy wants. One that would take the
    /// place of a good one of the same template is not made, nor of one of another that was made just now.
    fn make_more(&mut self, of: &TemplateOf, served: &ServedTemplate, view: &SettingsView<'_>) {
        let is_good = |kept: &&StoredImage| kept.runs_left > 0 && kept.since.elapsed() < served.max_age;
        let images = self.all.get(of).map_or(&[][..], |state| &state.images);
        let (good, largest) = (images.iter().filter(is_good).count(), images.iter().map(|kept| kept.image.made.size).max());
        if good > 0 && (good as u64 + 1) * largest.unwrap_or(0) > view.memory / PART_OF_MEMORY {
            return;
        }
        let others = self.all.iter().filter(|(other, _)| *other != of).flat_map(|(_, state)| &state.images);
        let held: u64 = others.filter(|kept| kept.since.elapsed() < HELD).map(|kept| kept.image.made.size).sum();
        if held + self.all.get(of).map_or(0, |state| state.size) > view.memory / PART_OF_MEMORY {
            return;
        }
        let is_underway = self.queue.contains(of) || self.making.as_ref().is_some_and(|(making, ..)| making == of);
        if good < served.images as usize && !is_underway {
            self.queue.push_back(of.clone());
        }
    }

    /// Starts the next maker, if none is at work.
    fn make_next(&mut self, view: &SettingsView<'_>) -> Vec<Reply> {
        let mut replies = Vec::new();
        while self.making.is_none() {
            let Some(of) = self.queue.pop_front() else { break };
            let Some(state) = self.all.get(&of) else { continue };
            let (policy, key) = (Some(of.policy.clone()), Some(state.key.clone()));
            let options = Options { policy, key, peer: view.account.cloned(), ..Options::default() };
            match Maker::start_for_worker(&of.runtime, &options) {
                Ok(maker) => self.making = Some((of, maker, Instant::now())),
                Err(why) => replies.extend(self.refuse(&of, why.to_string(), view)),
            }
        }
        replies
    }

    /// Keeps an image, lends it to those who wait, and has the next made.
    fn keep(&mut self, of: &TemplateOf, image: TemplateImage, begun: Instant, view: &SettingsView<'_>) -> Result<Vec<Reply>, String> {
        // Its key has gone meanwhile.
        let (Some(served), Some(_)) = (view.served(of), self.all.get(of)) else { return Ok(Vec::new()) };
        let (size, most) = (image.made.size, view.memory / PART_OF_MEMORY);
        if size > most {
            let [size, most] = [size, most].map(|bytes| bytes.div_ceil(1 << 20));
            return Err(format!("its image has {size} MiB, and all images together may have {most} MiB, an eighth of [capacity] memory"));
        }
        let known = sealed_file(&serde_json::to_vec(&image.made).map_err(|error| error.to_string())?).map_err(|error| error.to_string())?;
        let (ms, mib) = (begun.elapsed().as_millis(), size.div_ceil(1 << 20));
        (view.tell)(&format!("stockade: {}: an image of {mib} MiB, made and tried in {ms} ms", named(of, served)));
        self.last += 1;
        let kept = StoredImage { number: self.last, image, known: Arc::new(known), since: Instant::now(), runs_left: served.max_runs };
        while self.size() + size > most && self.drop_oldest(of) {}
        let state = self.all.entry(of.clone()).or_default();
        (state.broken, state.size) = (0, size);
        // One that is too old served until now.
        state.images.retain(|kept| kept.since.elapsed() < served.max_age);
        state.images.push(kept);
        let mut replies = Vec::new();
        for worker in std::mem::take(&mut state.waiting).into_iter().filter(|worker| view.workers.contains(worker)) {
            match state.lend(worker, of, false, served, view) {
                Some(reply) => replies.push(reply),
                None => state.waiting.push(worker),
            }
        }
        self.make_more(of, served, view);
        Ok(replies)
    }

    fn size(&self) -> u64 {
        self.all.values().flat_map(|state| &state.images).map(|kept| kept.image.made.size).sum()
    }

    /// Drops an image of the template that was asked for least recently. Whether there was any.
    fn drop_oldest(&mut self, but: &TemplateOf) -> bool {
        let with_images = self.all.iter().filter(|(_, state)| !state.images.is_empty());
        let oldest = with_images.min_by_key(|(of, state)| (*of == but, state.used)).map(|(of, _)| of.clone());
        let state = oldest.and_then(|oldest| self.all.get_mut(&oldest));
        state.map(|state| state.images.remove(0)).is_some()
    }

    /// None is made again for some time, unless the settings are read anew.
    fn refuse(&mut self, of: &TemplateOf, why: String, view: &SettingsView<'_>) -> Vec<Reply> {
        // Its key or its policy has gone meanwhile.
        let (Some(served), Some(state)) = (view.served(of), self.all.get_mut(of)) else { return Vec::new() };
        (view.tell)(&format!("stockade: {}: refused: {why}", named(of, served)));
        state.images.clear();
        let waiting = std::mem::take(&mut state.waiting);
        state.refused = Some((why.clone(), Instant::now()));
        waiting.into_iter().map(|worker| refusal(worker, of, why.clone())).collect()
    }
}

impl State {
    /// Lends a worker the image with the most copies left: one that is too old only where there is no other,
    /// and the worker has none either.
    fn lend(&mut self, worker: u32, of: &TemplateOf, has_one: bool, served: &ServedTemplate, view: &SettingsView<'_>) -> Option<Reply> {
        let is_old = |kept: &StoredImage| kept.since.elapsed() >= served.max_age;
        let is_of_use = |kept: &&mut StoredImage| kept.runs_left > 0 && !(has_one && is_old(kept));
        let kept = self.images.iter_mut().filter(is_of_use).max_by_key(|kept| (!is_old(kept), kept.runs_left))?;
        let runs = (served.max_runs / (2 * view.workers.len().max(1) as u64)).clamp(1, MAX_LENT).min(kept.runs_left);
        kept.runs_left -= runs;
        let age_ms = u64::try_from(kept.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        let made_ms = monotonic_ms().saturating_sub(age_ms);
        let message = FromSupervisor::Template(TemplateLent { of: of.clone(), number: kept.number, runs, made_ms });
        Some(Reply { worker, message, files: Some((Arc::clone(&kept.image.file), Arc::clone(&kept.known))) })
    }
}

fn refusal(worker: u32, of: &TemplateOf, why: String) -> Reply {
    Reply { worker, message: FromSupervisor::NoTemplate(TemplateRefused { of: of.clone(), why }), files: None }
}

/// A template, for people.
fn named(of: &TemplateOf, served: &ServedTemplate) -> String {
    let key = of.key.as_ref().map_or_else(|| String::from("all keys"), |key| format!("key {key}"));
    format!("template {} of policy {} for {key}", served.name, of.policy)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use stockade_protocol::service::{Credential, Scope};

    fn key(id: &str, policies: &[&str]) -> Key {
        Key {
            id: id.to_owned(),
            credential: Credential::Uid(1),
            policies: policies.iter().map(|policy| (*policy).to_owned()).collect(),
            scopes: vec![Scope::Run],
            running: 1,
            waiting: 1,
            sessions: 1,
            runs_per_minute: None,
            cpu_per_hour: None,
            weight: 1,
            expires: None,
        }
    }

    fn served(policy: &str, is_shared: bool, ready: u32) -> ServedTemplate {
        ServedTemplate {
            policy: policy.to_owned(),
            runtime: "python".to_owned(),
            name: "bare".to_owned(),
            max_runs: 100,
            max_age: Duration::from_secs(600),
            images: 1,
            is_shared,
            ready,
        }
    }

    fn of(policy: &str, key: Option<&str>) -> TemplateOf {
        TemplateOf { policy: policy.to_owned(), runtime: "python".to_owned(), key: key.map(str::to_owned) }
    }

    fn stored(number: u64, since: Instant) -> StoredImage {
        let made = serde_json::from_str(r#"{"modules": [], "files": {}, "size": 1, "start_sha256": ""}"#).unwrap();
        let file = Arc::new(sealed_file(b"x").unwrap());
        StoredImage { number, image: TemplateImage { file: Arc::clone(&file), made }, known: file, since, runs_left: 100 }
    }

    #[test]
    fn each_key_has_workers_that_are_ready_for_it_unless_it_shares_them() {
        let keys = [key("a", &["one", "two"]), key("b", &["two"]), key("c", &[])];
        let ready = |templates: &[ServedTemplate]| {
            ready_workers(&keys, templates).into_iter().map(|ready| format!("{} {}", ready.key, ready.policy)).collect::<Vec<_>>()
        };
        assert_eq!(ready(&[served("two", false, 2)]), ["a two", "b two", "a two", "b two"]);
        assert_eq!(ready(&[served("two", true, 2), served("one", false, 1)]), ["a two", "a two", "a one"]);
        assert_eq!(ready(&[served("two", false, 0), served("unused", true, 3)]), [""; 0]);
    }

    #[test]
    fn a_worker_may_ask_for_what_its_key_has() {
        let (keys, templates) = ([key("a", &["one"]), key("b", &["one", "two"])], [served("one", false, 0), served("two", true, 0)]);
        let view = SettingsView { templates: &templates, keys: &keys, workers: &[7], memory: 1 << 30, account: None, tell: &|_| () };
        for (template, key, is_granted) in [
            (of("one", Some("a")), "a", true),
            (of("two", None), "b", true),
            // Another key's, and one that is not shared.
            (of("one", Some("a")), "b", false),
            (of("one", None), "a", false),
            (of("two", Some("b")), "b", false),
            // Without the policy, without the template, and no key.
            (of("two", None), "a", false),
            (of("three", Some("b")), "b", false),
            (of("one", Some("c")), "c", false),
        ] {
            assert_eq!(view.granted(&template, key).is_some(), is_granted, "{template:?} {key}");
            if !is_granted {
                let wanted = TemplateWanted { of: template, key: key.to_owned(), unfit: None, has_one: false };
                let replies = TemplateStore::default().ask(7, wanted, &view);
                assert!(matches!(&replies[..], [Reply { worker: 7, message: FromSupervisor::NoTemplate(_), .. }]));
            }
        }
    }

    #[test]
    fn no_more_is_lent_than_there_is_and_the_images_take_turns() {
        let (keys, templates) = ([key("a", &["one"])], [served("one", false, 0)]);
        let view = SettingsView { templates: &templates, keys: &keys, workers: &[7, 8], memory: 1 << 30, account: None, tell: &|_| () };
        let now = Instant::now();
        let old = now.checked_sub(Duration::from_secs(601)).unwrap();
        let mut state = State { images: vec![stored(1, now), stored(2, now), stored(3, old)], ..State::default() };
        let mut lent = BTreeMap::<u64, Vec<u64>>::new();
        while let Some(reply) = state.lend(7, &of("one", Some("a")), false, &templates[0], &view) {
            let FromSupervisor::Template(TemplateLent { number, runs, .. }) = reply.message else { panic!("{:?}", reply.message) };
            if number == 3 {
                assert!(state.images.iter().all(|kept| kept.number == 3 || kept.runs_left == 0), "an old one is the last");
            }
            lent.entry(number).or_default().push(runs);
            assert_eq!((reply.files().len(), reply.worker), (2, 7));
        }
        for runs in lent.values() {
            assert_eq!((runs.iter().sum::<u64>(), runs.len()), (100, 4), "{lent:?}");
        }
        assert_eq!(lent.len(), 3);
    }

    #[test]
    fn a_worker_that_has_copies_left_is_lent_no_image_that_is_too_old() {
        let (keys, templates) = ([key("a", &["one"])], [served("one", false, 0)]);
        let view = SettingsView { templates: &templates, keys: &keys, workers: &[7], memory: 1 << 30, account: None, tell: &|_| () };
        let old = Instant::now().checked_sub(Duration::from_secs(601)).unwrap();
        let mut state = State { images: vec![stored(1, old)], ..State::default() };
        let mut lend = |has_one| state.lend(7, &of("one", Some("a")), has_one, &templates[0], &view).is_some();
        assert_eq!((lend(true), lend(false)), (false, true));
        let mut state = State { images: vec![stored(1, Instant::now())], ..State::default() };
        assert!(state.lend(7, &of("one", Some("a")), true, &templates[0], &view).is_some());
    }

    #[test]
    fn an_image_that_was_made_just_now_makes_no_room_for_another_template() {
        let (keys, templates) = ([key("a", &["one", "two"])], [served("one", false, 0), served("two", false, 0)]);
        // Room for one image of one byte.
        let view = SettingsView { templates: &templates, keys: &keys, workers: &[7], memory: PART_OF_MEMORY, account: None, tell: &|_| () };
        let (one, two) = (of("one", Some("a")), of("two", Some("a")));
        let queued = |since| {
            let mut store = TemplateStore::default();
            store.all.insert(one.clone(), State { images: vec![stored(1, since)], size: 1, ..State::default() });
            store.all.insert(two.clone(), State { size: 1, ..State::default() });
            store.make_more(&two, &templates[1], &view);
            store.queue.len()
        };
        let now = Instant::now();
        assert_eq!((queued(now), queued(now.checked_sub(HELD).unwrap())), (0, 1));
    }

    #[test]
    fn what_comes_of_a_template_that_has_gone_is_forgotten() {
        let (keys, templates) = ([key("a", &["one"])], [served("one", false, 0)]);
        let view = SettingsView { templates: &templates, keys: &keys, workers: &[7], memory: 1 << 30, account: None, tell: &|_| () };
        let (mut store, gone) = (TemplateStore::default(), of("one", Some("a")));
        assert!(store.refuse(&gone, String::from("why"), &view).is_empty() && store.all.is_empty());
        store.all.insert(gone.clone(), State { waiting: vec![7], ..State::default() });
        assert_eq!(store.refuse(&gone, String::from("why"), &view).len(), 1);
    }

    #[test]
    fn a_shared_image_stays_as_long_as_any_key_may_use_it() {
        let templates = [served("one", true, 0), served("two", false, 0)];
        let mut store = TemplateStore::default();
        for (template, key) in [(of("one", None), "a"), (of("two", Some("a")), "a")] {
            store.all.insert(template, State { key: key.to_owned(), images: vec![stored(1, Instant::now())], ..State::default() });
        }
        let mut reload = |keys: &[Key]| {
            let view = SettingsView { templates: &templates, keys, workers: &[], memory: 1 << 30, account: None, tell: &|_| () };
            store.reload(&view);
            store.all.iter().map(|(of, state)| (of.policy.clone(), state.key.clone())).collect::<Vec<_>>()
        };
        let both = [("one".to_owned(), "a".to_owned()), ("two".to_owned(), "a".to_owned())];
        assert_eq!(reload(&[key("b", &["one", "two"]), key("a", &["one", "two"])]), both);
        // The key that had asked has gone. The other has no images of its own to come to.
        assert_eq!(reload(&[key("b", &["one", "two"])]), [("one".to_owned(), "b".to_owned())]);
        assert_eq!(reload(&[key("b", &["two"])]), []);
    }
}
