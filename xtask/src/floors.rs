//! Floors: which modules each module of a crate may import. The check reads the imports from the code.
//!
//! A method needs no import: an upper module may write `impl Zone` for the type of a lower one, and any module that has a zone may
//! call what stands there. So the check also reads the calls of such methods. It knows them by name, and leaves out a name that
//! several modules define.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use syn::visit::{self, Visit};

use crate::shell::Shell;

/// The modules of `crates/pagemill` by floors, from the ground up. A module may import modules of lower floors and those in its
/// own folder.
const FLOORS: &[&[&str]] = &[
    &["build_error", "process"],
    &["error", "sync"],
    &["account", "claims", "fault", "idle", "in_flight", "memory", "misuse", "shutting", "topology", "wait", "word"],
    &["shared", "tasks"],
    &["zone"],
    &["registry"],
    &["free", "reclaim"],
    &["handle"],
    &["list", "run"],
    &["zones"],
    &["context"],
    &["claim", "walk"],
    &["slow"],
    &["allocator"],
    &["path"],
    &["bulk"],
    &["arenas", "background", "give_back", "populate", "stats", "weak"],
    &["builder", "device", "mempool"],
    &["dma_pool", "page_cache", "page_pool", "runtimes"],
];

const CRATES: [&str; 3] = ["pagemill-core", "pagemill-os", "pagemill"];

/// For each module that has a file, the modules of other files that it imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// The problems, and a note on how much was checked.
pub(crate) fn check(shell: &Shell) -> Result<(Vec<String>, String)> {
    let (mut problems, mut edges) = (Vec::new(), 0);
    for name in CRATES {
        let all = Crate::read(&shell.root.join("crates").join(name).join("src"))?;
        let imports = all.imports();
        edges += imports.values().map(BTreeSet::len).sum::<usize>();
        let circles = circles(&imports);
        problems.extend(
            circles
                .iter()
                .map(|file| format!("{name}: `{file}` imports a file that imports it, directly or by others")),
        );
        if name == "pagemill" {
            problems.extend(floors(&imports));
            problems.extend(calls_upward(&all));
        }
    }
    Ok((problems, format!("{edges} imports, all to floors below; no circle of files")))
}

/// The imports that the floors forbid, and the modules that stand on no floor.
fn floors(imports: &Imports) -> BTreeSet<String> {
    let top = |module: &str| module.split("::").next().unwrap_or_default().to_owned();
    let nowhere = |module: &str| format!("`{module}` stands on no floor: place it in FLOORS in xtask/src/floors.rs");
    let mut problems = BTreeSet::new();
    for (from, to) in imports.iter().flat_map(|(from, to)| to.iter().map(move |to| (top(from), top(to)))) {
        match (floor(&from), floor(&to)) {
            _ if from == to => {}
            (None, _) => _ = problems.insert(nowhere(&from)),
            (_, None) => _ = problems.insert(nowhere(&to)),
            (Some(from_floor), Some(to_floor)) if to_floor < from_floor => {}
            _ => _ = problems.insert(format!("`{from}` imports `{to}`, which does not stand below it")),
        }
    }
    problems
}

/// The floor of a module of the crate's root.
fn floor(module: &str) -> Option<usize> {
    FLOORS.iter().position(|floor| floor.contains(&module))
}

/// The calls of methods that a higher module adds to a type of the caller's floor or a lower one.
fn calls_upward(all: &Crate) -> BTreeSet<String> {
    let modules = || all.0.iter().filter_map(|(at, names)| Some((at.first()?.as_str(), names)));
    let (mut types, mut homes) = (BTreeMap::new(), BTreeMap::<_, BTreeSet<_>>::new());
    for (module, names) in modules() {
        types.extend(names.types.iter().map(|name| (name, module)));
        names.methods.iter().for_each(|(of, method)| _ = homes.entry(method).or_default().insert((module, of)));
    }
    let problem = |module: &str, method: &String| {
        let &(home, of) = homes.get(method).filter(|homes| homes.len() == 1)?.first()?;
        let has_type = *types.get(of)? != home && floor(types[of]) <= floor(module);
        let is_above = home != module && floor(home) > floor(module);
        (has_type && is_above).then(|| format!("`{module}` calls `{method}`, which `{home}` above it adds to `{of}`"))
    };
    let problem = &problem;
    modules().flat_map(|(module, names)| names.calls.iter().filter_map(move |method| problem(module, method))).collect()
}

/// The modules that import themselves, directly or through others.
fn circles(imports: &Imports) -> BTreeSet<String> {
    let reaches_itself = |start: &str| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![start]);
        while let Some(to) = next.pop().and_then(|module| imports.get(module)) {
            next.extend(to.iter().map(String::as_str).filter(|to| seen.insert(*to)));
        }
        seen.contains(start)
    };
    imports.keys().filter(|module| reaches_itself(module)).cloned().collect()
}

/// A crate: its modules that have a file, by their paths.
#[derive(Default)]
struct Crate(BTreeMap<Vec<String>, Names>);

/// The names in a file.
#[derive(Default)]
struct Names {
    /// Whole paths, from the root of the crate.
    paths: BTreeSet<Vec<String>>,
    /// Its re-exports (`pub use`), by the name that others see.
    exports: BTreeMap<String, Vec<String>>,
    /// The types that it defines.
    types: BTreeSet<String>,
    /// The methods that it defines, each with its type: not those of traits, which any type may have.
    methods: BTreeSet<(String, String)>,
    /// The names of methods that it calls.
    calls: BTreeSet<String>,
}

impl Crate {
    fn read(src: &Path) -> Result<Self> {
        let mut all = Self::default();
        all.read_folder(src, &[])?;
        Ok(all)
    }

    fn read_folder(&mut self, folder: &Path, module: &[String]) -> Result<()> {
        for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let mut at = module.to_vec();
            if path.is_dir() {
                at.push(name);
                self.read_folder(&path, &at)?;
            } else if path.extension().is_some_and(|end| end == "rs") {
                if name != "mod" && name != "lib" {
                    at.push(name);
                }
                let file = syn::parse_file(&fs::read_to_string(&path)?).with_context(|| path.display().to_string())?;
                let mut reader = Reader { at: at.clone(), names: Names::default() };
                reader.visit_file(&file);
                self.0.insert(at, reader.names);
            }
        }
        Ok(())
    }

    fn imports(&self) -> Imports {
        let mut imports = Imports::new();
        // The root only declares its modules and re-exports.
        for (at, names) in self.0.iter().filter(|(at, _)| !at.is_empty()) {
            let others = names.paths.iter().filter_map(|path| self.module_of(path, at, 0));
            let others = others.filter(|other| other != at && !other.is_empty());
            imports.insert(at.join("::"), others.map(|other| other.join("::")).collect());
        }
        imports
    }

    /// The module whose file defines the item that a path names, seen from `at`. None for items of other crates.
    fn module_of(&self, path: &[String], at: &[String], depth: usize) -> Option<Vec<String>> {
        let mut path = path.to_vec();
        let mut here = match path.first()?.as_str() {
            "crate" => vec![],
            _ if self.0.contains_key(&[at, &path[..1]].concat()) => at.to_vec(), // A child by its name.
            _ => return None,
        };
        if path[0] == "crate" {
            path.remove(0);
        }
        for (i, name) in path.iter().enumerate() {
            let child = [&here[..], std::slice::from_ref(name)].concat();
            if self.0.contains_key(&child) {
                here = child;
            } else if let Some(export) = self.0[&here].exports.get(name).filter(|_| depth < 8) {
                let whole = [export, &path[i + 1..]].concat();
                return self.module_of(&whole, &here, depth + 1).or(Some(here));
            } else {
                break;
            }
        }
        Some(here)
    }
}

/// Collects the names in a file, without code that is compiled only for tests.
struct Reader {
    /// Its position: the file's module, and modules inside it.
    at: Vec<String>,
    names: Names,
}

impl Reader {
    /// Resolves `self` and `super` at the beginning of a path; leaves other paths as they are.
    fn whole(&self, mut path: Vec<String>) -> Vec<String> {
        let mut at = self.at.clone();
        if path.first().is_none_or(|first| first != "self" && first != "super") {
            return path;
        }
        while let Some(first) = path.first().filter(|first| *first == "self" || *first == "super") {
            if first == "super" {
                at.pop();
            }
            path.remove(0);
        }
        [vec!["crate".to_owned()], at, path].concat()
    }

    fn name(&mut self, path: Vec<String>) {
        let mut whole = self.whole(path);
        if let [name] = &whole[..]
            && let Some(export) = self.names.exports.get(name)
        {
            whole = export.clone();
        }
        self.names.paths.insert(whole);
    }

    fn walk_use(&mut self, tree: &syn::UseTree, before: &[String], is_handed_on: bool) {
        let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        let (path, seen_as) = match tree {
            syn::UseTree::Path(path) => return self.walk_use(&path.tree, &with(&path.ident), is_handed_on),
            syn::UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.walk_use(tree, before, is_handed_on));
            }
            // The names of a glob are not traced further, re-exported or not.
            syn::UseTree::Glob(_) => return self.name(before.to_vec()),
            syn::UseTree::Name(name) if name.ident == "self" => (before.to_vec(), before.last().cloned()),
            syn::UseTree::Name(name) => (with(&name.ident), Some(name.ident.to_string())),
            syn::UseTree::Rename(rename) => (with(&rename.ident), Some(rename.rename.to_string())),
        };
        match seen_as.filter(|_| is_handed_on) {
            // A re-export counts as an import only if the file uses the name.
            Some(seen_as) => _ = self.names.exports.insert(seen_as, self.whole(path)),
            None => self.name(path),
        }
    }
}

/// Whether an item is compiled only for tests.
fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            let text = list.tokens.to_string();
            text == "test" || text.starts_with("all (test")
        }
        meta => meta.path().is_ident("test"),
    })
}

impl<'a> Visit<'a> for Reader {
    fn visit_item(&mut self, item: &'a syn::Item) {
        let attributes = match item {
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Use(item) => &item.attrs,
            syn::Item::Struct(syn::ItemStruct { ident, .. }) | syn::Item::Enum(syn::ItemEnum { ident, .. }) => {
                self.names.types.insert(ident.to_string());
                return visit::visit_item(self, item);
            }
            _ => return visit::visit_item(self, item),
        };
        if !is_for_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        self.at.push(item.ident.to_string());
        visit::visit_item_mod(self, item);
        self.at.pop();
    }

    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        self.walk_use(&item.tree, &[], !matches!(item.vis, syn::Visibility::Inherited));
    }

    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        if let (None, syn::Type::Path(of)) = (&item.trait_, &*item.self_ty)
            && let Some(of) = of.path.segments.last()
        {
            let methods = item.items.iter().filter_map(|item| match item {
                syn::ImplItem::Fn(method) => Some((of.ident.to_string(), method.sig.ident.to_string())),
                _ => None,
            });
            self.names.methods.extend(methods);
        }
        visit::visit_item_impl(self, item);
    }

    fn visit_expr_method_call(&mut self, call: &'a syn::ExprMethodCall) {
        self.names.calls.insert(call.method.to_string());
        visit::visit_expr_method_call(self, call);
    }

    /// `pub(super)` names a place and imports nothing.
    fn visit_visibility(&mut self, _: &'a syn::Visibility) {}

    fn visit_path(&mut self, path: &'a syn::Path) {
        self.name(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    /// The parser sees only tokens in a macro's arguments: `crate::` begins a path there.
    fn visit_macro(&mut self, mac: &'a syn::Macro) {
        let text = mac.tokens.to_string().replace(' ', "");
        for path in text.split("crate::").skip(1) {
            let end = path.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')).unwrap_or(path.len());
            let names = path[..end].split("::").filter(|name| !name.is_empty()).map(str::to_owned);
            self.name(std::iter::once("crate".to_owned()).chain(names).collect());
        }
        visit::visit_macro(self, mac);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The imports of a crate with these files.
    fn imports_of(files: &[(&str, &str)]) -> Imports {
        crate_of(files).imports()
    }

    fn crate_of(files: &[(&str, &str)]) -> Crate {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Crate::read(folder.path()).unwrap()
    }

    fn of(imports: &Imports, module: &str) -> Vec<String> {
        imports[module].iter().cloned().collect()
    }

    #[test]
    fn a_name_is_traced_through_re_exports_to_its_file() {
        let imports = imports_of(&[
            ("lib.rs", "mod free; mod list; mod page; pub use page::Page;"),
            ("free.rs", "mod large; pub(crate) use large::{Large, Small}; pub(crate) fn finish(_: Small) {}"),
            ("free/large.rs", "use super::finish; use crate::{Page, list}; fn end() { list::join(); finish() }"),
            ("list.rs", "use crate::free::Large; #[cfg(test)] mod tests { use crate::page::Other; }"),
            ("page.rs", "fn f() { assert!(crate::list::is_empty()); std::mem::drop(0) }"),
        ]);
        assert_eq!(of(&imports, "free"), ["free::large"]);
        assert_eq!(of(&imports, "free::large"), ["free", "list", "page"]);
        assert_eq!(of(&imports, "list"), ["free::large"]);
        assert_eq!(of(&imports, "page"), ["list"]);
        assert!(!imports.contains_key(""));
        assert_eq!(circles(&imports).into_iter().collect::<Vec<_>>(), ["free", "free::large", "list", "page"]);
    }

    #[test]
    fn an_upward_import_and_a_module_without_a_floor_are_problems() {
        let imports = imports_of(&[
            ("lib.rs", "mod sync; mod stats; mod cellar;"),
            ("sync.rs", "use crate::stats::Stats;"),
            ("stats.rs", "use crate::sync::Mutex;"),
            ("cellar.rs", "use crate::sync::Mutex;"),
        ]);
        let problems: Vec<_> = floors(&imports).into_iter().collect();
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].starts_with("`cellar` stands on no floor"), "{problems:?}");
        assert_eq!(problems[1], "`sync` imports `stats`, which does not stand below it");
    }

    #[test]
    fn a_call_of_a_method_from_a_floor_above_is_named() {
        let all = crate_of(&[
            ("lib.rs", "mod wait; mod zone; mod stats; mod builder;"),
            ("wait.rs", "fn f(list: &[u8]) { list.sum() }"),
            (
                "zone.rs",
                "struct Zone; impl Zone { fn end(&self) { self.sum(); self.len(); self.room(); self.drop_all() } }",
            ),
            (
                "stats.rs",
                "struct S; impl S { fn room(&self) {} } impl Drop for Zone { fn drop_all(&self) {} }
                impl Zone { fn sum(&self) {} fn len(&self) {} }",
            ),
            ("builder.rs", "fn f(zone: &Zone) { zone.sum(); zone.end() } impl List { fn len(&self) {} }"),
        ]);
        let problems: Vec<_> = calls_upward(&all).into_iter().collect();
        assert_eq!(problems, ["`zone` calls `sum`, which `stats` above it adds to `Zone`"]);
    }
}
