"""The shortest program: code in, a typed result out."""

import stockade

result = stockade.run("print(6*7)")
print(result.output, end="")

# A failed program is a result too; its verdict names what ended it.
result = stockade.run("import time; print('working'); time.sleep(60)", timeout=0.5)
print(result.output.strip(), result.code, result.verdict)

# In a session files persist from run to run, and no process does.
with stockade.Session() as session:
    session.run("open('note', 'w').write('kept')")
    print(session.read_file("note").decode())
