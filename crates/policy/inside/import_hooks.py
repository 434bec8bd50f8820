
# Below is Stockade's: it notes or refuses what the policy's [runtimes.NAME.modules] names.
# It stands in this codec because every CPython reads that before any code, whatever its
# options and variables are. It is advice: code of the same process can undo it.
def _watch(rules, default, open_to, pipe, place):
    import posix, sys
    from _thread import get_ident

    library = __file__.rpartition('/encodings/')[0] + '/'
    busy, counts, asked, judged = set(), {}, set(), {}
    writes = posix.O_WRONLY | posix.O_RDWR | posix.O_CREAT | posix.O_TRUNC
    idle = True

    def send(line):
        # At once, and with no descriptor in between: neither an end nor a close loses it.
        try:
            fd = posix.open(pipe, posix.O_WRONLY | posix.O_NONBLOCK | posix.O_CLOEXEC)
        except OSError:
            return
        try:
            posix.write(fd, line.encode())
        except OSError:
            pass
        finally:
            posix.close(fd)

    def rule(name, module):
        if name in rules:
            return rules[name]
        parent = name.rpartition('.')[0]
        while parent:
            if parent + '.*' in rules:
                return rules[parent + '.*']
            if module and parent in rules:
                return rules[parent]
            parent = parent.rpartition('.')[0]
        return default if module else 'allow'

    def is_installed(file):
        # Where code can write, a name makes no library.
        return ('/site-packages/' in file or '/dist-packages/' in file) and file[:1] == '/' and not file.startswith(open_to)

    def is_library(frame):
        file = frame.f_code.co_filename
        return file.startswith((library, '<frozen ')) or is_installed(path_file(frame) or file)

    def path_file(frame):
        # A line of a .pth file is of no file itself.
        while frame and frame.f_code.co_filename == '<string>':
            frame = frame.f_back
        return reads_path_file(frame)

    def reads_path_file(frame):
        if is_site(frame) and frame.f_code.co_name == 'addpackage':
            return '%s/' % (frame.f_locals.get('sitedir'),)

    def is_site(frame):
        return frame and frame.f_code.co_filename in ('<frozen site>', library + 'site.py')

    def count(action, kind, name):
        # Once and then at each doubling, so that a loop neither waits nor fills anything.
        n = counts[name] = counts.get(name, 0) + 1
        if n & (n - 1) == 0:
            frame = sys._getframe()
            while frame and is_library(frame):
                frame = frame.f_back
            line, file = (frame.f_lineno, frame.f_code.co_filename) if frame else (0, '')
            said = action, kind, ascii(name)[1:-1][:128], n - n // 2, line or 0, ascii(file)[1:-1][:256]
            send('%s\t%s\t%s\t%d\t%d\t%s\n' % said)

    def act(action, kind, name):
        count(action, kind, name)
        if action == 'deny':
            why = '%s %s is refused by the policy; to allow it, write "%s" = "allow" under %s' % (kind, name, name, place)
            raise ImportError(why, name=name) if kind == 'import' else PermissionError(1, why)

    def is_importing(frame):
        return frame and frame.f_code.co_filename.startswith('<frozen importlib')

    def imports(frame, name):
        while is_importing(frame) or (frame and frame.f_code.co_name == 'import_module'):
            # It is asked for, and not imported.
            if frame.f_code.co_filename == '<frozen importlib.util>':
                return
            frame = frame.f_back
        # What a library needs of others is its own affair: the code asked for the library.
        if frame and not is_library(frame):
            action = rule(name, True)
            if action != 'allow':
                act(action, 'import', name)

    def opens(path):
        if type(path) is bytes:
            path = path.decode('utf-8', 'surrogateescape')
        # A descriptor was opened before.
        if type(path) is not str or path == pipe:
            return
        if path[:1] != '/':
            try:
                path = posix.getcwd() + '/' + path
            except OSError:
                return
        parts = []
        for part in path.split('/'):
            if part == '..':
                del parts[-1:]
            elif part not in ('', '.'):
                parts.append(part)
        if not ('/' + '/'.join(parts) + '/').startswith(open_to):
            act(judged['open'], 'event', 'write_outside')

    def meet(event, args):
        if event == 'import':
            if len(args) > 1 and args[1] is None:
                imports(sys._getframe(2).f_back, args[0])
                asked.add(args[0])
            return
        action = judged[event] = rule('write_outside' if event == 'open' else event, False)
        # An import opens and lists files of its own, and so does what looks for .pth files.
        caller = sys._getframe(2).f_back
        if action == 'allow' or is_importing(caller) or is_site(caller):
            return
        if event != 'open':
            act(action, 'event', event)
        elif len(args) > 2 and type(args[2]) is int and args[2] & writes:
            opens(args[0])

    def runs_path_file(event):
        # One that code can have written.
        file = reads_path_file(sys._getframe(2)) if event == 'exec' else None
        return file and not is_installed(file)

    def alone(work, *args):
        # What is done here raises events too.
        me = get_ident()
        if me not in busy:
            busy.add(me)
            try:
                work(*args)
            finally:
                busy.discard(me)

    def hook(event, args):
        nonlocal idle
        if not idle:
            if judged.get(event) != 'allow':
                alone(meet, event, args)
        # Until then the interpreter gets itself ready.
        elif event.startswith('cpython.run_') or (event == 'import' and args[0] == 'sitecustomize') or runs_path_file(event):
            idle = False
            send('watch\n')

    class StockadeModules:
        # What importlib.import_module imports raises no event.
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name in asked:
                asked.discard(name)
            elif not idle:
                alone(lambda: imports(sys._getframe(2).f_back, name))

    posix.register_at_fork(after_in_child=counts.clear)
    sys.meta_path.insert(0, StockadeModules)
    sys.addaudithook(hook)
